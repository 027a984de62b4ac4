"""Bidirectional networks (Schuster and Paliwal 1997): layers of two builders, one for each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dynbatch import functions
from dynbatch.errors import ConfigurationError
from dynbatch.graph import Expression
from dynbatch.parameters import Parameter, ParameterCollection
from dynbatch.rnn.builder import RNNBuilder
from dynbatch.rnn.state import RNNState


class BiRNNBuilder:
    """Builder of a network that reads in both directions; each layer sees both outputs of the one below, joined.

    ```python
    rnn = dy.BiRNNBuilder(1, 128, 100, model, dy.LSTMBuilder)
    y1, y2, y3 = rnn.transduce([x1, x2, x3])
    ```

    Arguments:
        num_layers: how many.
        input_dim: size of the inputs.
        hidden_dim: size of the outputs, even: half of it from each direction.
        model: the collection to add the parameters to, as a subcollection.
        rnn_builder_factory: a builder class, or ``factory(layers, input_dim, hidden_dim, model)``.
        builder_layers: (forward, backward) pairs of builders to use instead of new ones.

    Raises:
        ConfigurationError: no layers, or an odd ``hidden_dim``.
    """

    def __init__(
        self,
        num_layers: int,
        input_dim: int,
        hidden_dim: int,
        model: ParameterCollection,
        rnn_builder_factory: Callable[..., RNNBuilder],
        builder_layers: Sequence[tuple[RNNBuilder, RNNBuilder]] | None = None,
    ) -> None:
        if builder_layers is None:
            if num_layers < 1:
                raise ConfigurationError(f"BiRNNBuilder: num_layers must be a positive integer, not {num_layers}")
            if hidden_dim % 2:
                raise ConfigurationError(f"BiRNNBuilder: hidden_dim must be even, not {hidden_dim}")
        elif not builder_layers:
            raise ConfigurationError("BiRNNBuilder: builder_layers is empty")
        self._collection = model.add_subcollection("birnn")
        if builder_layers is None:
            sizes = [input_dim, *[hidden_dim] * (num_layers - 1)]

            def builder(size: int) -> RNNBuilder:
                return rnn_builder_factory(1, size, hidden_dim // 2, self._collection)

            builder_layers = [(builder(size), builder(size)) for size in sizes]
        self.builder_layers = list(builder_layers)

    def whoami(self) -> str:
        """The builder's name."""
        return type(self).__name__

    def param_collection(self) -> ParameterCollection:
        """The collection of all parameters (but those of given ``builder_layers``)."""
        return self._collection

    def get_parameters(self) -> list[list[Parameter]]:
        """The parameters of each direction of each layer: forward, backward, forward, ... from the first layer on."""
        return [ps for pair in self.builder_layers for builder in pair for ps in builder.get_parameters()]

    def set_dropout(self, d: float) -> None:
        """Set the dropout of every builder; see `RNNBuilder.set_dropout`."""
        for pair in self.builder_layers:
            for builder in pair:
                builder.set_dropout(d)

    def disable_dropout(self) -> None:
        """Turn dropout off."""
        for pair in self.builder_layers:
            for builder in pair:
                builder.disable_dropout()

    def add_inputs(self, es: Iterable[Any]) -> list[tuple[RNNState, RNNState]]:
        """The last layer's states at each input: (forward, having read up to it; backward, having read from the end).

        Arguments:
            es: the whole sequence; none gives an empty list.
        """
        xs = self._through(es, self.builder_layers[:-1])
        forward, backward = self.builder_layers[-1]
        states = backward.initial_state().add_inputs(xs[::-1])
        return list(zip(forward.initial_state().add_inputs(xs), states[::-1]))

    def transduce(self, es: Iterable[Any]) -> list[Expression]:
        """The outputs at each input: that of the forward direction above that of the backward one, ``(hidden_dim,)``.

        Arguments:
            es: the whole sequence; none gives an empty list.
        """
        return self._through(es, self.builder_layers)

    def _through(self, es: Iterable[Any], layers: Sequence[tuple[RNNBuilder, RNNBuilder]]) -> list[Expression]:
        xs = list(es)
        for forward, backward in layers:
            ends = backward.initial_state().transduce(xs[::-1])
            xs = [functions.concatenate(pair) for pair in zip(forward.initial_state().transduce(xs), ends[::-1])]
        return xs
