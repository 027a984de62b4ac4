"""The LSTM with coupled input and forget gates and peepholes (Greff et al. 2015, "CIFG"), as DyNet has it."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynbatch import functions
from dynbatch.cell import cell
from dynbatch.parameters import Parameter
from dynbatch.rnn.builder import Layer, RNNBuilder, affine, masked


class CoupledLSTMParameters(NamedTuple):
    """Of one layer; shapes for d inputs and n hidden."""

    W_ix: Parameter  # (n, d)
    W_ih: Parameter  # (n, n)
    W_ic: Parameter  # (n, n)
    b_i: Parameter  # (n,)
    W_ox: Parameter
    W_oh: Parameter
    W_oc: Parameter
    b_o: Parameter
    W_cx: Parameter
    W_ch: Parameter
    b_c: Parameter


class CoupledLSTMLayer(Layer):
    """One layer."""

    p: CoupledLSTMParameters

    @cell
    def step(self, x: Any, c: Any, h: Any) -> Any:
        """The new c and h."""
        return self.equations(x, c, h, None)

    @cell
    def dropped_step(self, x: Any, c: Any, h: Any, mask_x: Any, mask_h: Any, mask_c: Any) -> Any:
        """`step` under masks; that of c is for the peepholes alone."""
        return self.equations(functions.cmult(x, mask_x), c, masked(h, mask_h), mask_c)

    def equations(self, x: Any, c: Any, h: Any, mask_c: Any) -> Any:
        """A step, given what is left of x and h."""
        p = self.p
        i = functions.logistic(affine(p.b_i, (p.W_ix, x), (p.W_ih, h), (p.W_ic, seen(c, mask_c))))
        g = functions.tanh(affine(p.b_c, (p.W_cx, x), (p.W_ch, h)))
        new_c = functions.cmult(i, g) if c is None else functions.cmult(1 - i, c) + functions.cmult(i, g)
        o = functions.logistic(affine(p.b_o, (p.W_ox, x), (p.W_oh, h), (p.W_oc, seen(new_c, mask_c))))
        return new_c, functions.cmult(o, functions.tanh(new_c))


def seen(c: Any, mask: Any) -> Any:
    """c as the peepholes see it."""
    return c if mask is None else masked(c, mask)


class CoupledLSTMBuilder(RNNBuilder):
    """Builder of the LSTM whose forget gate is one minus the input gate, with peepholes (full matrices).

    In each layer, with x the input (the h of the layer below) and c, h the layer's previous state::

        i = logistic(W_ix x + W_ih h + W_ic c + b_i)
        g = tanh(W_cx x + W_ch h + b_c)
        c' = (1 - i) * c + i * g
        o = logistic(W_ox x + W_oh h + W_oc c' + b_o)
        h' = o * tanh(c')

    ``get_parameters()`` has ``W_ix, W_ih, W_ic, b_i, W_ox, W_oh, W_oc, b_o, W_cx, W_ch, b_c`` for each layer: for d
    inputs and n hidden ``(n, d)`` for x, ``(n, n)`` for h and c, ``(n,)`` for biases; matrices start as Glorot, biases
    as zero.
    """

    collection_name = "lstm-builder"
    state_vectors = 2

    def add_layer(self, input_dim: int) -> Layer:
        """Add the parameters of a layer."""
        add, n = self._collection.add_parameters, self.hidden_dim
        i_and_o = [p for _ in "io" for p in (add((n, input_dim)), add((n, n)), add((n, n)), add(n, init=0))]
        return CoupledLSTMLayer(CoupledLSTMParameters(*i_and_o, *[add((n, input_dim)), add((n, n)), add(n, init=0)]))

    def set_dropout(self, d: float) -> None:
        """Turn variational dropout on (Gal and Ghahramani 2016): masks are drawn once for each sequence and layer.

        Arguments:
            d: the rate, at least 0 and below 1, for the layers' inputs, the previous h, and c where the gates see it;
                0 turns it off.

        Raises:
            ConfigurationError: another rate.
        """
        self.set_rates(d, d, d)
