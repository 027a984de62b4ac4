"""The LSTM without peepholes (Hochreiter and Schmidhuber 1997; forget gate: Gers, Schmidhuber and Cummins 2000)."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynbatch import functions
from dynbatch.cell import cell
from dynbatch.parameters import Parameter, ParameterCollection
from dynbatch.rnn.builder import Layer, RNNBuilder, affine, constants, masked


class VanillaLSTMParameters(NamedTuple):
    """Of one layer; shapes for d inputs and n hidden. The gates are stacked in the order i, f, o, g."""

    W_x: Parameter  # (4 n, d)
    W_h: Parameter  # (4 n, n)
    b: Parameter  # (4 n,)


class LayerNormParameters(NamedTuple):
    """Gains and biases of what is normalized: ``W_h h``, ``W_x x`` and the new c."""

    gain_h: Parameter  # (4 n,)
    bias_h: Parameter  # (4 n,)
    gain_x: Parameter  # (4 n,)
    bias_x: Parameter  # (4 n,)
    gain_c: Parameter  # (n,)
    bias_c: Parameter  # (n,)


class VanillaLSTMLayer(Layer):
    """One layer, with layer normalization or (``norm`` None) without."""

    p: VanillaLSTMParameters

    def __init__(self, p: VanillaLSTMParameters, norm: LayerNormParameters | None, forget_bias: float) -> None:
        super().__init__(p)
        self.norm = norm
        self.forget_bias = forget_bias

    def constant(self) -> Layer:
        """The same layer, whose parameters get no gradient from it."""
        return VanillaLSTMLayer(constants(self.p), self.norm and constants(self.norm), self.forget_bias)

    @cell
    def step(self, x: Any, c: Any, h: Any) -> Any:
        """The new c and h."""
        gates = self.gates(x, h)
        n = len(gates) // 4
        i = functions.logistic(gates[:n])
        f = functions.logistic(gates[n : 2 * n] + self.forget_bias)
        o = functions.logistic(gates[2 * n : 3 * n])
        g = functions.tanh(gates[3 * n :])
        new_c = functions.cmult(i, g) if c is None else functions.cmult(f, c) + functions.cmult(i, g)
        return new_c, functions.cmult(o, functions.tanh(self.normalized(new_c)))

    @cell
    def dropped_step(self, x: Any, c: Any, h: Any, mask_x: Any, mask_h: Any) -> Any:
        """`step` under masks."""
        return self.step(functions.cmult(x, mask_x), c, masked(h, mask_h))

    def gates(self, x: Any, h: Any) -> Any:
        """The stacked gates, before their nonlinearities."""
        p, norm = self.p, self.norm
        if norm is None:
            return affine(p.b, (p.W_x, x), (p.W_h, h))
        gates = p.b + functions.layer_norm(p.W_x * x, norm.gain_x, norm.bias_x)
        return gates if h is None else gates + functions.layer_norm(p.W_h * h, norm.gain_h, norm.bias_h)

    def normalized(self, c: Any) -> Any:
        """c as the output sees it."""
        return c if self.norm is None else functions.layer_norm(c, self.norm.gain_c, self.norm.bias_c)


class VanillaLSTMBuilder(RNNBuilder):
    """Builder of the LSTM with separate input and forget gates and without peepholes.

    In each layer, with x the input (the h of the layer below) and c, h the layer's previous state::

        i = logistic(W_ix x + W_ih h + b_i)
        f = logistic(W_fx x + W_fh h + b_f + forget_bias)
        o = logistic(W_ox x + W_oh h + b_o)
        g = tanh(W_gx x + W_gh h + b_g)
        c' = f * c + i * g
        h' = o * tanh(c')

    ``get_parameters()`` has ``W_x (4 n, d), W_h (4 n, n), b (4 n,)`` for each layer, for d inputs and n hidden, the
    gates stacked in the order i, f, o, g; matrices start as Glorot, biases as zero.

    Arguments:
        layers: how many.
        input_dim: size of the inputs.
        hidden_dim: size of c, h and the outputs.
        model: the collection to add the parameters to, as a subcollection.
        ln_lstm: normalize ``W_x x`` and ``W_h h`` (all gates together) and the c in h' (Ba, Kiros and Hinton 2016).
        forget_bias: added to the forget gate, beside its learned bias.
    """

    collection_name = "vanilla-lstm-builder"
    state_vectors = 2

    def __init__(
        self,
        layers: int,
        input_dim: int,
        hidden_dim: int,
        model: ParameterCollection,
        ln_lstm: bool = False,
        forget_bias: float = 1.0,
    ) -> None:
        self.ln_lstm = bool(ln_lstm)
        self.forget_bias = float(forget_bias)
        super().__init__(layers, input_dim, hidden_dim, model)

    def add_layer(self, input_dim: int) -> Layer:
        """Add the parameters of a layer."""
        add, n = self._collection.add_parameters, self.hidden_dim
        p = VanillaLSTMParameters(add((4 * n, input_dim)), add((4 * n, n)), add(4 * n, init=0))
        # Named, so that W_x, W_h and b keep the numbers that they have without layer normalization.
        norm = LayerNormParameters(
            *(
                add(size, init=init, name=f"{kind}_{of}")
                for of, size in (("h", 4 * n), ("x", 4 * n), ("c", n))
                for kind, init in (("gain", 1), ("bias", 0))
            )
        ) if self.ln_lstm else None  # fmt: skip
        return VanillaLSTMLayer(p, norm, self.forget_bias)

    def set_dropout(self, d: float) -> None:
        """`set_dropouts` with one rate for both."""
        self.set_rates(d, d)

    def set_dropouts(self, d: float, d_r: float) -> None:
        """Turn variational dropout on (Gal and Ghahramani 2016): masks are drawn once for each sequence and layer.

        Arguments:
            d: the rate for the layers' inputs.
            d_r: the rate for the previous h.

        Raises:
            ConfigurationError: a rate that is not at least 0 and below 1.
        """
        self.set_rates(d, d_r)
