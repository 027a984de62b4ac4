"""The gated recurrent unit (Cho et al. 2014), as DyNet has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dynbatch import functions
from dynbatch.cell import cell
from dynbatch.graph import Expression, Operand
from dynbatch.parameters import Parameter
from dynbatch.rnn.builder import Layer, RNNBuilder, affine
from dynbatch.rnn.state import Run


class GRUParameters(NamedTuple):
    """Of one layer; shapes for d inputs and n hidden."""

    W_zx: Parameter  # (n, d)
    W_zh: Parameter  # (n, n)
    b_z: Parameter  # (n,)
    W_rx: Parameter
    W_rh: Parameter
    b_r: Parameter
    W_hx: Parameter
    W_hh: Parameter
    b_h: Parameter


class GRULayer(Layer):
    """One layer."""

    p: GRUParameters

    @cell
    def step(self, x: Any, h: Any) -> Any:
        """The new h."""
        p = self.p
        z = functions.logistic(affine(p.b_z, (p.W_zx, x), (p.W_zh, h)))
        if h is None:
            return (functions.cmult(z, functions.tanh(affine(p.b_h, (p.W_hx, x)))),)
        r = functions.logistic(affine(p.b_r, (p.W_rx, x), (p.W_rh, h)))
        u = functions.tanh(affine(p.b_h, (p.W_hx, x), (p.W_hh, functions.cmult(r, h))))
        return (functions.cmult(1 - z, h) + functions.cmult(z, u),)

    @cell
    def dropped_step(self, x: Any, h: Any, rate: Any) -> Any:
        """`step` on an input with dropout."""
        return self.step(functions.dropout(x, rate), h)


class GRUBuilder(RNNBuilder):
    """Builder of the gated recurrent unit (Cho et al. 2014).

    In each layer, with x the input (the h of the layer below) and h the layer's previous state::

        z = logistic(W_zx x + W_zh h + b_z)
        r = logistic(W_rx x + W_rh h + b_r)
        u = tanh(W_hx x + W_hh (r * h) + b_h)
        h' = (1 - z) * h + z * u

    ``get_parameters()`` has ``W_zx, W_zh, b_z, W_rx, W_rh, b_r, W_hx, W_hh, b_h`` for each layer, of the shapes
    ``(n, d), (n, n), (n,)`` three times, for d inputs and n hidden; matrices start as Glorot, biases as zero.
    """

    collection_name = "gru-builder"

    def add_layer(self, input_dim: int) -> Layer:
        """Add the parameters of a layer."""
        add, n = self._collection.add_parameters, self.hidden_dim
        return GRULayer(GRUParameters(*(p for _ in "zrh" for p in (add((n, input_dim)), add((n, n)), add(n, init=0)))))

    def set_dropout(self, d: float) -> None:
        """Turn dropout on for the layers' inputs and for the output, drawn anew at each step.

        Arguments:
            d: the rate, at least 0 and below 1; 0 turns it off.

        Raises:
            ConfigurationError: another rate.
        """
        self.set_rates(d)

    def dropped(self, run: Run, x: Operand) -> Sequence[tuple[Any, ...]]:
        """The rate, for each layer."""
        return [self.rates or ()] * len(run.layers)

    def draw(self, run: Run, batch_size: int) -> None:
        """Nothing: there are no masks of a whole sequence."""

    def dropped_output(self, h: Expression) -> Expression:
        """The output; h itself, which the next step reads, is not dropped."""
        return functions.dropout(h, self.rates[0]) if self.rates else h
