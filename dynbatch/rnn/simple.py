"""The simple recurrent network (Elman 1990): ``h' = tanh(W_x x + W_h h + b)``."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynbatch import functions
from dynbatch.cell import cell
from dynbatch.parameters import Parameter
from dynbatch.rnn.builder import Layer, RNNBuilder, affine, masked


class SimpleRNNParameters(NamedTuple):
    """Of one layer; shapes for d inputs and n hidden."""

    W_x: Parameter  # (n, d)
    W_h: Parameter  # (n, n)
    b: Parameter  # (n,)


class SimpleRNNLayer(Layer):
    """One layer."""

    p: SimpleRNNParameters

    @cell
    def step(self, x: Any, h: Any) -> Any:
        """The new h."""
        p = self.p
        return (functions.tanh(affine(p.b, (p.W_x, x), (p.W_h, h))),)

    @cell
    def dropped_step(self, x: Any, h: Any, mask_x: Any, mask_h: Any) -> Any:
        """`step` under masks."""
        return self.step(functions.cmult(x, mask_x), masked(h, mask_h))


class SimpleRNNBuilder(RNNBuilder):
    """Builder of the simple recurrent network (Elman 1990).

    In each layer, with x the input (the h of the layer below) and h the layer's previous state::

        h' = tanh(W_x x + W_h h + b)

    ``get_parameters()`` has ``W_x (n, d), W_h (n, n), b (n,)`` for each layer, for d inputs and n hidden; matrices
    start as Glorot, biases as zero.
    """

    collection_name = "simple-rnn-builder"

    def add_layer(self, input_dim: int) -> Layer:
        """Add the parameters of a layer."""
        add, n = self._collection.add_parameters, self.hidden_dim
        return SimpleRNNLayer(SimpleRNNParameters(add((n, input_dim)), add((n, n)), add(n, init=0)))

    def set_dropout(self, d: float) -> None:
        """`set_dropouts` with one rate for both."""
        self.set_rates(d, d)

    def set_dropouts(self, d: float, d_h: float) -> None:
        """Turn variational dropout on (Gal and Ghahramani 2016): masks are drawn once for each sequence and layer.

        Arguments:
            d: the rate for the layers' inputs.
            d_h: the rate for the previous h.

        Raises:
            ConfigurationError: a rate that is not at least 0 and below 1.
        """
        self.set_rates(d, d_h)
