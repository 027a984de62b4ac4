"""What all builders share: construction as in DyNet, the initial state, and variational dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynbatch import functions
from dynbatch.errors import ConfigurationError, user_line
from dynbatch.graph import state as current
from dynbatch.rnn.state import RNNState, Run

if TYPE_CHECKING:
    from dynbatch.graph import Expression, Operand
    from dynbatch.parameters import Parameter, ParameterCollection


class Layer:
    """One layer: its parameters, and the cell of a step.

    A subclass has the cells ``step(x, ..., h)`` and ``dropped_step(x, ..., h, *what dropout adds)``. They return the
    layer's new state as a tuple, h last; what comes in behind ``x`` is the old one, all None at the first step.

    Arguments:
        p: the parameters, in the order of `RNNBuilder.get_parameters`; one object, so that the guard of the cell
            is one comparison.
    """

    step: Any
    dropped_step: Any

    def __init__(self, p: Any) -> None:
        self.p = p

    def constant(self) -> Layer:
        """The same layer, whose parameters get no gradient from it."""
        return type(self)(constants(self.p))


def constants(p: Any) -> Any:
    """A named tuple of parameters, as constants."""
    return type(p)(*[functions.const_parameter(parameter) for parameter in p])


def affine(b: Parameter, *products: tuple[Any, Any]) -> Expression:
    """``b + W * v + ...`` of the pairs ``(W, v)``, without those whose ``v`` is None (before the first step)."""
    return functions.affine_transform([b, *(e for W, v in products if v is not None for e in (W, v))])


def masked(v: Any, mask: Expression) -> Any:
    """``v`` with its mask applied; None stays None."""
    return None if v is None else functions.cmult(v, mask)


class RNNBuilder:
    """Base of the builders.

    Arguments:
        layers: how many, each on the output of the one below.
        input_dim: size of the inputs.
        hidden_dim: size of the state and of the outputs.
        model: the collection to add the parameters to, as a subcollection.

    Attributes:
        rates: dropout rates, None where dropout is off; the first is that of the layers' inputs.

    Raises:
        ConfigurationError: a size that is not a positive integer.
    """

    collection_name = ""
    state_vectors = 1  # per layer

    def __init__(self, layers: int, input_dim: int, hidden_dim: int, model: ParameterCollection) -> None:
        for name, size in (("layers", layers), ("input_dim", input_dim), ("hidden_dim", hidden_dim)):
            if not hasattr(size, "__index__") or size < 1:
                raise ConfigurationError(f"{self.whoami()}: {name} must be a positive integer, not {size!r}")
        self.input_dim = int(input_dim)
        self.hidden_dim = int(hidden_dim)
        self.rates: tuple[float, ...] | None = None
        self._collection = model.add_subcollection(self.collection_name)
        self._layers = [self.add_layer(self.input_dim if i == 0 else self.hidden_dim) for i in range(layers)]
        self._constant_layers: list[Layer] | None = None
        self._latest: Run | None = None

    def add_layer(self, input_dim: int) -> Layer:
        """Add the parameters of a layer."""
        raise NotImplementedError

    def whoami(self) -> str:
        """The builder's name."""
        return type(self).__name__

    # Sequences

    def initial_state(self, vecs: Sequence[Any] | None = None, update: bool = True) -> RNNState:
        """The state before the first input. Each call starts a sequence, with dropout masks of its own.

        Arguments:
            vecs: what to start from: vectors in the order of `RNNState.s`; as if zero where not given.
            update: False: the parameters receive no gradient from this sequence.

        Raises:
            ShapeError: see `RNNState.set_s`.
        """
        if not update and self._constant_layers is None:
            self._constant_layers = [layer.constant() for layer in self._layers]
        layers = self._layers if update else self._constant_layers
        run = Run(self, layers)  # type: ignore[arg-type]
        if current.tracer is None:  # a cell must not change what it reads
            self._latest = run
        state = RNNState(run, [(None,) * self.state_vectors] * len(self._layers), None, None)
        return state if vecs is None else state.set_s(vecs)

    def initial_state_from_raw_vectors(self, vecs: Sequence[Any], update: bool = True) -> RNNState:
        """`initial_state` from arrays instead of expressions."""
        return self.initial_state([functions.inputVector(v) for v in vecs], update)

    # Parameters

    def get_parameters(self) -> list[list[Parameter]]:
        """The parameters of each layer, in DyNet's order (without those of layer normalization)."""
        return [list(layer.p) for layer in self._layers]

    def get_parameter_expressions(self) -> list[list[Parameter]]:
        """The same as `get_parameters`: parameters are operands."""
        return self.get_parameters()

    def param_collection(self) -> ParameterCollection:
        """The collection that holds all parameters of this builder and nothing else."""
        return self._collection

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, those of layer normalization too, in the order they were added."""
        return self._collection.parameters_list()

    # Dropout

    def set_dropout(self, d: float) -> None:
        """Turn dropout on at this rate, for everything that the builder drops.

        Arguments:
            d: at least 0 and below 1; 0 turns it off.

        Raises:
            ConfigurationError: another rate.
        """
        raise NotImplementedError

    def disable_dropout(self) -> None:
        """Turn dropout off, also for sequences that have begun."""
        self.rates = None

    def set_rates(self, *rates: float) -> None:
        """Set `rates`, checked."""
        for rate in rates:
            if not 0 <= rate < 1:
                raise ConfigurationError(
                    f"{user_line()}: {self.whoami()}: a dropout rate must be at least 0 and below 1, not {rate}"
                )
        self.rates = tuple(float(r) for r in rates) if any(rates) else None

    def dropped(self, run: Run, x: Operand) -> Sequence[tuple[Any, ...]]:
        """For each layer what ``dropped_step`` takes beyond ``step``: by default the masks of the sequence."""
        if run.stale():
            self.draw(run, x.dim()[1])
        return run.masks

    def dropped_output(self, h: Expression) -> Expression:
        """What comes of the last layer's h."""
        return h

    def draw(self, run: Run, batch_size: int) -> None:
        """Draw a sequence's masks: one for each rate, in each layer (Gal and Ghahramani 2016: tied over time)."""
        assert self.rates is not None
        run.masks = [
            tuple(
                _mask(self.input_dim if i == k == 0 else self.hidden_dim, rate, batch_size)
                for k, rate in enumerate(self.rates)
            )
            for i in range(len(run.layers))
        ]

    def set_dropout_masks(self, batch_size: int = 1) -> None:
        """Draw the masks of the sequence that `initial_state` began last: now, and for a batch size.

        Otherwise they are drawn when its first input is added, for the batch size of that, which is what is wanted
        unless only later inputs are batched.
        """
        if self._latest is not None and self.rates is not None:
            self.draw(self._latest, batch_size)


def _mask(size: int, rate: float, batch_size: int) -> Expression:
    """Zero at the rate, else what keeps the mean; each batch element has its own."""
    drawn = [functions.random_bernoulli(size, 1 - rate, 1 / (1 - rate)) for _ in range(batch_size)]
    return drawn[0] if batch_size == 1 else functions.concatenate_to_batch(drawn)
