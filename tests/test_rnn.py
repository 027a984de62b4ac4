"""RNN builders: against a plain NumPy network, and against DyNet where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.errors import ConfigurationError, DynbatchError, ShapeError, StaleExpressionError
from dynbatch.rnn import (
    BiRNNBuilder,
    CoupledLSTMBuilder,
    GRUBuilder,
    LSTMBuilder,
    RNNBuilder,
    RNNState,
    SimpleRNNBuilder,
    VanillaLSTMBuilder,
)

INPUTS, HIDDEN = 3, 4
STRATEGIES = ("off", "depth", "agenda")


# ---- the same networks in NumPy -------------------------------------------------------------------------------------


def logistic(x):
    return 1 / (1 + np.exp(-x))


def layer_norm(x, gain, bias):
    return gain * (x - x.mean()) / np.sqrt(x.var() + 1e-12) + bias


def simple_step(p, x, h, mask_x=1, mask_h=1):
    W_x, W_h, b = p
    return (np.tanh(W_x @ (x * mask_x) + W_h @ (h * mask_h) + b),)


def gru_step(p, x, h):
    W_zx, W_zh, b_z, W_rx, W_rh, b_r, W_hx, W_hh, b_h = p
    z = logistic(W_zx @ x + W_zh @ h + b_z)
    r = logistic(W_rx @ x + W_rh @ h + b_r)
    u = np.tanh(W_hx @ x + W_hh @ (r * h) + b_h)
    return ((1 - z) * h + z * u,)


def lstm_step(p, x, c, h, mask_x=1, mask_h=1, forget_bias=1.0):
    W_x, W_h, b, *norm = p
    gates_x, gates_h = W_x @ (x * mask_x), W_h @ (h * mask_h)
    if norm:
        gain_h, bias_h, gain_x, bias_x, gain_c, bias_c = norm
        gates_x = layer_norm(gates_x, gain_x, bias_x)
        gates_h = layer_norm(gates_h, gain_h, bias_h) if h.any() else gates_h  # nothing before the first step
    i, f, o, g = np.split(gates_x + gates_h + b, 4)
    c = logistic(f + forget_bias) * c + logistic(i) * np.tanh(g)
    return c, logistic(o) * np.tanh(layer_norm(c, gain_c, bias_c) if norm else c)


def coupled_step(p, x, c, h, mask_x=1, mask_h=1, mask_c=1):
    W_ix, W_ih, W_ic, b_i, W_ox, W_oh, W_oc, b_o, W_cx, W_ch, b_c = p
    x, h = x * mask_x, h * mask_h
    i = logistic(W_ix @ x + W_ih @ h + W_ic @ (c * mask_c) + b_i)
    c = (1 - i) * c + i * np.tanh(W_cx @ x + W_ch @ h + b_c)
    return c, logistic(W_ox @ x + W_oh @ h + W_oc @ (c * mask_c) + b_o) * np.tanh(c)


def layer_normalized(layers, inputs, hidden, model):
    return VanillaLSTMBuilder(layers, inputs, hidden, model, ln_lstm=True)


KINDS = {
    "simple": (SimpleRNNBuilder, simple_step, 3, 1),
    "gru": (GRUBuilder, gru_step, 9, 1),
    "lstm": (VanillaLSTMBuilder, lstm_step, 3, 2),
    "ln_lstm": (layer_normalized, lstm_step, 9, 2),
    "coupled": (CoupledLSTMBuilder, coupled_step, 11, 2),
}
all_kinds = pytest.mark.parametrize("kind", list(KINDS))


def reference(kind, parameters, xs, s=None, masks=None):
    """Outputs, and s() after the last input, of the network with this flat list of parameter arrays."""
    _, step, each, kinds = KINDS[kind]
    layers = [parameters[k : k + each] for k in range(0, len(parameters), each)]
    s = [np.zeros(HIDDEN)] * (kinds * len(layers)) if s is None else list(s)
    outputs = []
    for x in xs:
        for i, p in enumerate(layers):
            places = [k * len(layers) + i for k in range(kinds)]
            new = step(p, x, *(s[k] for k in places), *(masks[i] if masks else ()))
            for k, value in zip(places, new):
                s[k] = value
            x = new[-1]
        outputs.append(x)
    return outputs, s


def built(kind, layers=1, model=None):
    """A builder whose biases are not zero."""
    builder = KINDS[kind][0](layers, INPUTS, HIDDEN, model or dy.ParameterCollection())
    rng = np.random.default_rng(5)
    for p in builder.parameters:
        if len(p.shape) == 1:
            p.set_value(p.as_array() + 0.3 * rng.standard_normal(p.shape))
    return builder


def arrays(builder):
    return [p.as_array() for p in builder.parameters]


def inputs(length, seed=0):
    return np.random.default_rng(seed).standard_normal((length, INPUTS))


def values(expressions):
    return [e.npvalue() for e in expressions]


def close(got, wanted, tolerance=1e-10):
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


# ---- values and gradients -------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("layers", [1, 3])
def test_values_equal_numpy(float64, kind, layers):
    rnn = built(kind, layers)
    xs = inputs(5)
    states = rnn.initial_state().add_inputs([dy.inputVector(x) for x in xs])
    outputs, s = reference(kind, arrays(rnn), xs)
    close(values([state.output() for state in states]), outputs)
    close(values(states[-1].s()), s)
    close(values(states[-1].h()), s[-layers:])
    dy.renew_cg()
    close(values(rnn.initial_state().transduce([dy.inputVector(x) for x in xs])), outputs)


@all_kinds
@pytest.mark.parametrize("given", [False, True])
def test_gradients_equal_finite_differences(float64, kind, given):
    rnn = built(kind, 2)
    rng = np.random.default_rng(1)
    xs, weights = inputs(4), rng.standard_normal((4, HIDDEN))
    s = rng.standard_normal((2 * KINDS[kind][3], HIDDEN)) if given else None

    def loss_at(parameters, xs, s):
        return sum(w @ y for w, y in zip(weights, reference(kind, parameters, xs, s)[0]))

    x_exprs = [dy.inputVector(x) for x in xs]
    s_exprs = [dy.inputVector(v) for v in s] if given else None
    outputs = rnn.initial_state(s_exprs).transduce(x_exprs)
    loss = dy.esum([dy.dot_product(dy.inputVector(w), y) for w, y in zip(weights, outputs)])
    parameters = arrays(rnn)
    assert loss.value() == pytest.approx(loss_at(parameters, xs, s), rel=1e-10)
    loss.backward(full=True)

    def check(gradient, at):
        direction = rng.standard_normal(gradient.shape)
        step = 1e-5
        difference = (at(step * direction) - at(-step * direction)) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(difference, rel=1e-6, abs=1e-8)

    for k, p in enumerate(rnn.parameters):
        before, after = parameters[:k], parameters[k + 1 :]
        check(p.grad_as_array(), lambda d: loss_at([*before, parameters[k] + d, *after], xs, s))  # noqa: B023
    check(np.stack([x.gradient() for x in x_exprs]), lambda d: loss_at(parameters, xs + d, s))
    if given:
        check(np.stack([v.gradient() for v in s_exprs]), lambda d: loss_at(parameters, xs, s + d))


@all_kinds
def test_sequences_of_different_lengths_batch(float64, kind):
    """One by one without batching, and all together: the same losses and gradients, in about as many batches as the
    longest has steps."""
    layers, lengths = 2, [3, 12, 1, 7, 12, 5, 9, 2]
    rnn = built(kind, layers)
    table = rnn.param_collection().add_lookup_parameters((50, INPUTS))
    rng = np.random.default_rng(2)
    sentences = [rng.integers(0, 50, length).tolist() for length in lengths]

    def loss(sentence):
        outputs = rnn.initial_state().transduce([table[word] for word in sentence])
        return dy.squared_norm(dy.average(outputs))

    def gradients():
        result = [*(p.grad_as_array() for p in rnn.parameters), table.grad_as_array()]
        rnn.param_collection().reset_gradient()
        return result

    alone = []
    with dy.autobatch("off"):
        for sentence in sentences:
            dy.renew_cg()
            one = loss(sentence)
            alone.append(one.value())
            one.backward()
    wanted = gradients()
    for strategy in STRATEGIES:
        dy.renew_cg()
        with dy.autobatch(strategy):
            losses = [loss(sentence) for sentence in sentences]
            total = dy.esum(losses)
            total.value()
            steps = [b for b in dy.plan().batch_reports if "step" in b.name]
            np.testing.assert_allclose([one.value() for one in losses], alone, rtol=1e-12)
            total.backward()
        close(gradients(), wanted)
        assert sum(b.rows for b in steps) == layers * sum(lengths)
        if strategy == "off":
            assert len(steps) == layers * sum(lengths)
        else:
            assert layers * max(lengths) <= len(steps) <= layers * max(lengths) + 4


@all_kinds
def test_batch_elements(float64, kind):
    rnn = built(kind, 2)
    xs = np.stack([inputs(4, seed) for seed in range(3)], axis=-1)  # (length, INPUTS, batch)
    outputs = rnn.initial_state().transduce([dy.inputTensor(x, batched=True) for x in xs])
    assert outputs[0].dim() == ((HIDDEN,), 3)
    for lane in range(3):
        close([y.npvalue()[:, lane] for y in outputs], reference(kind, arrays(rnn), xs[..., lane])[0])


def test_forget_bias(float64):
    rnn = VanillaLSTMBuilder(1, INPUTS, HIDDEN, dy.ParameterCollection(), forget_bias=-0.5)
    xs = inputs(3)
    got = rnn.initial_state().transduce([dy.inputVector(x) for x in xs])
    c = h = np.zeros(HIDDEN)
    for x, y in zip(xs, got):
        c, h = lstm_step(arrays(rnn), x, c, h, forget_bias=-0.5)
        close([y.npvalue()], [h])


# ---- states ---------------------------------------------------------------------------------------------------------


@all_kinds
def test_states_branch(float64, kind):
    rnn = built(kind, 2)
    a, b, c, d = inputs(4)
    start = rnn.initial_state()
    trunk = start.add_input(dy.inputVector(a))
    left = trunk.add_input(dy.inputVector(b)).add_input(dy.inputVector(c))
    trunk.output().value()
    right = trunk.add_input(dy.inputVector(d))
    for state, path in ((trunk, [a]), (left, [a, b, c]), (right, [a, d])):
        close([state.output().npvalue()], reference(kind, arrays(rnn), path)[0][-1:])
    assert right.prev() is trunk
    assert trunk.prev() is start
    assert start.prev() is None
    assert isinstance(right, RNNState)
    assert right.b() is rnn


@all_kinds
def test_the_state_can_be_given_and_replaced(float64, kind):
    layers, kinds = 2, KINDS[kind][3]
    rnn = built(kind, layers)
    x, y = inputs(2)
    given = np.random.default_rng(3).standard_normal((layers * kinds, HIDDEN))
    vecs = [dy.inputVector(v) for v in given]
    state = rnn.initial_state(vecs)
    close(values(state.s()), given)
    close([state.output().npvalue()], [given[-1]])
    close([state.add_input(dy.inputVector(x)).output().npvalue()], reference(kind, arrays(rnn), [x], given)[0])
    raw = rnn.initial_state_from_raw_vectors(given).add_input(dy.inputVector(x))
    close([raw.output().npvalue()], reference(kind, arrays(rnn), [x], given)[0])

    one = rnn.initial_state().add_input(dy.inputVector(x))
    s = values(one.s())
    hs = vecs[-layers:]
    changed = one.set_h(hs)
    assert changed.prev() is one
    close(values(changed.s()), [*s[:-layers], *given[-layers:]])
    then = changed.add_input(dy.inputVector(y)).output().npvalue()
    close([then], reference(kind, arrays(rnn), [y], [*s[:-layers], *given[-layers:]])[0])
    close(values(one.set_s(vecs).s()), given)
    close(values(one.s()), s)

    zero = np.zeros(HIDDEN)
    close(values(rnn.initial_state().set_h(hs).s()), [*[zero] * (layers * (kinds - 1)), *given[-layers:]])
    if kinds == 2:  # c alone: h stays
        close(values(one.set_s(vecs[:layers]).s()), [*given[:layers], *s[layers:]])
        close(values(rnn.initial_state(vecs[:layers]).s()), [*given[:layers], zero, zero])


@all_kinds
def test_a_learned_initial_state(float64, kind):
    model = dy.ParameterCollection()
    rnn = built(kind, 1, model)
    learned = [model.add_parameters(HIDDEN, init="uniform") for _ in range(KINDS[kind][3])]
    (x,) = inputs(1)
    output = rnn.initial_state(learned).add_input(dy.inputVector(x)).output()
    close([output.npvalue()], reference(kind, arrays(rnn), [x], [p.as_array() for p in learned])[0])
    dy.sum_elems(output).backward()
    assert all(p.grad_as_array().any() for p in learned)


def test_before_the_first_input(float64):
    for rnn in (built("gru", 2), built("lstm", 2)):
        state = rnn.initial_state()
        assert state.h() == state.s() == ()
        assert state.prev() is None
        with pytest.raises(DynbatchError, match=r"test_rnn\.py:\d+.*no output before an input is added.*empty"):
            state.output()


def test_an_empty_sequence_has_no_outputs(float64):
    model = dy.ParameterCollection()
    rnn, both = GRUBuilder(1, 3, 4, model), BiRNNBuilder(2, 3, 4, model, GRUBuilder)
    assert rnn.initial_state().transduce([]) == rnn.initial_state().add_inputs([]) == []
    assert both.transduce([]) == both.add_inputs([]) == []
    with pytest.raises(ShapeError, match="average: the list is empty"):
        dy.average(both.transduce(iter(())))


@all_kinds
def test_constant_parameters(float64, kind):
    """With update=False nothing goes to the builder's parameters, and gradients still pass through it."""
    rnn = built(kind, 2)
    table = dy.ParameterCollection().add_lookup_parameters((5, INPUTS))
    output = rnn.initial_state(update=False).transduce([table[0], table[3]])[-1]
    close([output.npvalue()], reference(kind, arrays(rnn), table.as_array()[[0, 3]])[0][-1:])
    dy.squared_norm(output).backward()
    assert not any(p.grad_as_array().any() for p in rnn.parameters)
    assert table.touched.tolist() == [0, 3]


@all_kinds
def test_within_a_cell(float64, kind):
    rnn = built(kind, 2)

    @dy.cell
    def step(x, s):
        return rnn.initial_state(list(s)).add_input(x).s()

    (x,) = inputs(1)
    s = np.random.default_rng(4).standard_normal((2 * KINDS[kind][3], HIDDEN))
    got = step(dy.inputVector(x), tuple(dy.inputVector(v) for v in s))
    close(values(got), reference(kind, arrays(rnn), [x], s)[1])


# ---- dropout --------------------------------------------------------------------------------------------------------


def mask_values(state):
    return [values(masks) for masks in state._run.masks]


@pytest.mark.parametrize("kind", ["simple", "lstm", "ln_lstm", "coupled"])
def test_masks_are_drawn_once_for_each_sequence_and_layer(float64, kind):
    rnn = built(kind, 2)
    rnn.set_dropout(0.5)
    xs = inputs(4)
    exprs = [dy.inputVector(x) for x in xs]
    state = rnn.initial_state()
    outputs = state.transduce(exprs)
    masks = mask_values(state)
    assert [m.shape for m in masks[0]] == [(INPUTS,), *[(HIDDEN,)] * (2 if kind == "coupled" else 1)]
    assert set(np.concatenate([m for layer in masks for m in layer])) == {0.0, 2.0}
    close(values(outputs), reference(kind, arrays(rnn), xs, masks=masks)[0])
    close(values(state.transduce(exprs)), values(outputs))  # a branch is the same sequence
    other = rnn.initial_state()
    other.add_input(exprs[0])
    assert any((a != b).any() for pair in zip(mask_values(other), masks) for a, b in zip(*pair))


@pytest.mark.parametrize("kind", ["simple", "lstm"])
def test_the_two_rates(float64, kind):
    rnn = KINDS[kind][0](2, 600, 600, dy.ParameterCollection())
    for rates in ((0.25, 0.0), (0.0, 0.75)):
        rnn.set_dropouts(*rates)
        state = rnn.initial_state()
        state.add_input(dy.inputVector(np.ones(600)))
        for masks in mask_values(state):
            for mask, rate in zip(masks, rates):
                assert set(mask) <= {0.0, 1 / (1 - rate)}
                assert np.mean(mask == 0) == pytest.approx(rate, abs=0.08)


def test_gru_drops_at_each_step(float64):
    rnn = GRUBuilder(1, 1000, 1000, dy.ParameterCollection())
    for p in rnn.parameters:
        p.zero()
    W_hx = rnn.get_parameters()[0][6]
    W_hx.set_value(0.1 * np.eye(1000))  # so that u, and 2 h of the first step, is tanh(x / 10)
    rnn.set_dropout(0.5)
    x = dy.inputVector(np.ones(1000))
    first, second = (rnn.initial_state().add_input(x) for _ in range(2))
    (h,) = values(first.h())
    output = first.output().npvalue()
    assert set(np.round(h, 12)) == {0.0, round(np.tanh(0.2) / 2, 12)}
    assert np.mean(h == 0) == pytest.approx(0.5, abs=0.08)
    assert np.mean(output[h != 0] == 0) == pytest.approx(0.5, abs=0.1)
    kept = output != 0
    np.testing.assert_allclose(output[kept], 2 * h[kept])
    assert (values(second.h())[0] != h).any()
    assert (first.add_input(x).output().npvalue() != output).any()
    assert (first.output().npvalue() == output).all()


@all_kinds
def test_dropout_can_be_turned_off(float64, kind):
    rnn = built(kind, 2)
    xs = inputs(3)
    exprs = [dy.inputVector(x) for x in xs]
    wanted = reference(kind, arrays(rnn), xs)[0]
    rnn.set_dropout(0.5)
    state = rnn.initial_state()
    assert not np.allclose(state.transduce(exprs)[-1].npvalue(), wanted[-1])
    rnn.disable_dropout()
    close(values(state.transduce(exprs)), wanted)
    rnn.set_dropout(0.5)
    rnn.set_dropout(0)
    close(values(rnn.initial_state().transduce(exprs)), wanted)


@all_kinds
def test_the_seed_decides(kind):
    """The same in every strategy, too, and with gradients through the masks."""
    results = []
    for strategy in (*STRATEGIES, "agenda"):
        dy.config.config.parameters_exist = False
        dy.init(dtype="float64", seed=7, autobatch=strategy)
        rnn = built(kind, 2)
        rnn.set_dropout(0.3)
        dy.renew_cg()
        outputs = [rnn.initial_state().transduce([dy.inputVector(x) for x in inputs(n, n)])[-1] for n in (3, 1, 4)]
        loss = dy.esum([dy.squared_norm(y) for y in outputs])
        loss.backward()
        results.append([*values(outputs), *(p.grad_as_array() for p in rnn.parameters)])
    for other in results[1:]:
        close(other, results[0])


@pytest.mark.parametrize("kind", ["simple", "lstm", "coupled"])
def test_masks_of_batch_elements(float64, kind):
    rnn = built(kind, 1)
    rnn.set_dropout(0.5)
    xs = np.random.default_rng(0).standard_normal((2, INPUTS, 20))
    state = rnn.initial_state()
    outputs = state.transduce([dy.inputTensor(x, batched=True) for x in xs])
    (masks,) = mask_values(state)
    assert masks[0].shape == (INPUTS, 20)
    assert len({tuple(column) for column in masks[0].T}) > 2
    for lane in range(20):
        wanted = reference(kind, arrays(rnn), xs[..., lane], masks=[[m[:, lane] for m in masks]])[0]
        close([y.npvalue()[:, lane] for y in outputs], wanted)
    late = rnn.initial_state()
    rnn.set_dropout_masks(batch_size=2)
    assert late._run.masks[0][0].dim() == ((INPUTS,), 2)


def test_a_kept_initial_state_serves_every_graph(float64):
    rnn = built("lstm", 1)
    rnn.set_dropout(0.5)
    start = rnn.initial_state()
    seen = []
    for _ in range(5):
        dy.renew_cg()
        seen.append(tuple(start.add_input(dy.inputVector(np.ones(INPUTS))).output().npvalue()))
    assert len(set(seen)) > 1


# ---- both directions ------------------------------------------------------------------------------------------------


@all_kinds
def test_both_directions(float64, kind):
    model = dy.ParameterCollection()
    rnn = BiRNNBuilder(2, INPUTS, 2 * HIDDEN, model, KINDS[kind][0])
    xs = inputs(5)
    exprs = [dy.inputVector(x) for x in xs]
    ys = list(xs)
    for pair in rnn.builder_layers:
        forward, backward = (reference(kind, arrays(builder), line)[0] for builder, line in zip(pair, (ys, ys[::-1])))
        ys = [np.concatenate(both) for both in zip(forward, backward[::-1])]
    outputs = rnn.transduce(iter(exprs))
    assert outputs[0].dim() == ((2 * HIDDEN,), 1)
    close(values(outputs), ys)
    states = rnn.add_inputs(exprs)
    close([np.concatenate(values(s.output() for s in both)) for both in states], ys)
    dy.esum([dy.sum_elems(y) for y in outputs]).backward()
    assert all(p.grad_as_array().any() for p in model.parameters_list())


def test_directions_of_given_builders(float64):
    model = dy.ParameterCollection()
    pair = SimpleRNNBuilder(1, INPUTS, HIDDEN, model), GRUBuilder(2, INPUTS, HIDDEN, model)
    rnn = BiRNNBuilder(1, INPUTS, 2 * HIDDEN, model, None, builder_layers=[pair])
    assert rnn.builder_layers == [pair]
    assert [len(ps) for ps in rnn.get_parameters()] == [3, 9, 9]
    x = dy.inputVector(inputs(1)[0])
    wanted = np.concatenate(values(b.initial_state().add_input(x).output() for b in pair))
    close(values(rnn.transduce([x])), [wanted])
    rnn.set_dropout(0.5)
    assert pair[0].rates == (0.5, 0.5)
    rnn.disable_dropout()
    assert pair[0].rates is pair[1].rates is None


# ---- parameters and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "name", "shapes"),
    [
        (SimpleRNNBuilder, "simple-rnn-builder", [(4, 3), (4, 4), (4,)]),
        (GRUBuilder, "gru-builder", [(4, 3), (4, 4), (4,)] * 3),
        (VanillaLSTMBuilder, "vanilla-lstm-builder", [(16, 3), (16, 4), (16,)]),
        (CoupledLSTMBuilder, "lstm-builder", [(4, 3), (4, 4), (4, 4), (4,)] * 2 + [(4, 3), (4, 4), (4,)]),
    ],
)
def test_parameters_are_dynets(builder, name, shapes):
    dy.init(seed=1)  # the bounds are those of a sample
    model = dy.ParameterCollection()
    rnn = builder(2, 3, 4, model)
    second = [(s[0], 4) if len(s) == 2 else s for s in shapes]
    assert [p.name for p in model.parameters_list()] == [f"/{name}/_{k}" for k in range(2 * len(shapes))]
    assert [p.shape for p in model.parameters_list()] == shapes + second
    assert rnn.param_collection().name == f"/{name}/"
    assert rnn.get_parameters() == [rnn.parameters[: len(shapes)], rnn.parameters[len(shapes) :]]
    for p in rnn.parameters:
        bound = 0 if len(p.shape) == 1 else np.sqrt(6 / sum(p.shape))  # Glorot
        assert np.abs(p.as_array()).max() == pytest.approx(bound, rel=0.35)
        assert np.abs(p.as_array()).max() <= bound * (1 + 1e-6)
    assert issubclass(builder, RNNBuilder)
    assert builder(1, 3, 4, model).param_collection().name == f"/{name}_1/"


def test_names_with_layer_normalization():
    model = dy.ParameterCollection()
    rnn = VanillaLSTMBuilder(2, 3, 4, model, ln_lstm=True)
    assert [[p.name for p in layer] for layer in rnn.get_parameters()] == [
        [f"/vanilla-lstm-builder/_{k}" for k in range(3 * layer, 3 * layer + 3)] for layer in range(2)
    ]
    gains = {p.name.rpartition("/")[2]: p.as_array() for p in rnn.parameters if "gain" in p.name}
    assert set(gains) == {f"gain_{of}{layer}" for of in "hxc" for layer in ("", "_1")}
    assert all((gain == 1).all() for gain in gains.values())
    assert LSTMBuilder is VanillaLSTMBuilder


def test_bad_sizes_and_rates():
    model = dy.ParameterCollection()
    for arguments in ((0, 3, 4), (1, 0, 4), (1, 3, -1), (1.5, 3, 4)):
        with pytest.raises(ConfigurationError, match=r"GRUBuilder: \w+ must be a positive integer, not "):
            GRUBuilder(*arguments, model)
    with pytest.raises(ConfigurationError, match="hidden_dim must be even, not 5"):
        BiRNNBuilder(1, 3, 5, model, GRUBuilder)
    with pytest.raises(ConfigurationError, match="num_layers must be a positive integer, not 0"):
        BiRNNBuilder(0, 3, 4, model, GRUBuilder)
    with pytest.raises(ConfigurationError, match="empty"):
        BiRNNBuilder(1, 3, 4, model, GRUBuilder, builder_layers=[])
    assert model.parameters_list() == []
    assert BiRNNBuilder(1, 3, 4, model, GRUBuilder).param_collection().name == "/birnn/"
    for kind in KINDS:
        rnn = built(kind)
        for rate in (1.0, -0.1, float("nan")):
            with pytest.raises(ConfigurationError, match=r"test_rnn\.py:\d+: \w+: a dropout rate must be at least 0"):
                rnn.set_dropout(rate)
        assert rnn.rates is None


@all_kinds
def test_wrong_inputs(float64, kind):
    rnn = built(kind, 2)
    state = rnn.initial_state()
    with pytest.raises(ShapeError, match=r"test_rnn\.py:\d+.*\(2,\).*builder/_\d"):
        state.add_input(dy.inputVector([1, 2]))
    after = state.add_input(dy.inputVector([1, 2, 3]))
    with pytest.raises(ShapeError, match=r"test_rnn\.py:\d+.*\(2,\).*builder/_\d"):
        after.add_input(dy.inputVector([1, 2]))
    with pytest.raises(TypeError, match="add_input: expected an Expression, not list"):
        state.add_input([1.0, 2.0, 3.0])
    good, bad = dy.zeros(HIDDEN), dy.zeros(HIDDEN + 1)
    with pytest.raises(ShapeError, match=r"set_h: expected 2 vectors, one a layer, not 1"):
        after.set_h([good])
    with pytest.raises(ShapeError, match=r"set_h: expected vectors of shape \(4,\), not \(5,\) \(position 1\)"):
        after.set_h([good, bad])
    with pytest.raises(ShapeError, match=r"set_s: expected 2 .*, not 3"):
        rnn.initial_state([good] * 3)
    with pytest.raises(ShapeError, match=r"set_s: expected 2 .*, not 0"):
        rnn.initial_state([])
    dy.renew_cg()
    with pytest.raises(StaleExpressionError):
        after.add_input(dy.inputVector([1, 2, 3]))


# ---- DyNet ----------------------------------------------------------------------------------------------------------

DYNET = """
import json, sys
import dynet_config
dynet_config.set(mem=256, random_seed=1)
import dynet as dy
import numpy as np

given = np.load(sys.argv[1])
found = {}
for name, (builder, arguments, options) in json.loads(sys.argv[2]).items():
    dy.renew_cg()
    model = dy.ParameterCollection()
    if builder == "BiRNNBuilder":
        rnn = dy.BiRNNBuilder(*arguments, model, getattr(dy, options.pop("of")))
    else:
        rnn = getattr(dy, builder)(*arguments, model, **options)
    parameters = model.parameters_list()
    for k, p in enumerate(parameters):
        p.set_value(given[f"{name}/p{k}"])
    xs = [dy.inputTensor(x) for x in given["xs"]]
    outputs = (rnn if builder == "BiRNNBuilder" else rnn.initial_state()).transduce(xs)
    loss = dy.esum([dy.dot_product(dy.inputTensor(w[: y.dim()[0][0]]), y) for w, y in zip(given["ws"], outputs)])
    loss.value()
    loss.backward()
    found[name + "/names"] = np.array([p.name() for p in parameters])
    found[name + "/outputs"] = np.stack([y.npvalue() for y in outputs])
    for k, p in enumerate(parameters):
        found[f"{name}/g{k}"] = p.grad_as_array()
    if builder != "BiRNNBuilder":
        s = [dy.inputTensor(v) for v in given["s"][: len(rnn.initial_state().add_input(xs[0]).s())]]
        state = rnn.initial_state(s).add_input(xs[0])
        found[name + "/given"] = np.stack([v.npvalue() for v in state.s()])
        changed = state.set_h(s[:2]).add_input(xs[1])
        found[name + "/changed"] = np.stack([v.npvalue() for v in changed.s()])
np.savez(sys.argv[3], **found)
"""


@pytest.mark.skipif(importlib.util.find_spec("dynet") is None, reason="DyNet is not installed")
def test_equals_dynet(tmp_path):
    """DyNet with the same parameter values gives the same outputs, states and gradients."""
    dy.init(seed=1)  # with some values float32's rounding, more of DyNet's than dynbatch's, is beyond the bounds
    cases = {
        "simple": ("SimpleRNNBuilder", (2, 5, 6), {}),
        "gru": ("GRUBuilder", (2, 5, 6), {}),
        "lstm": ("VanillaLSTMBuilder", (2, 5, 6), {}),
        "forget": ("LSTMBuilder", (2, 5, 6), {"forget_bias": 0.25}),
        "norm": ("VanillaLSTMBuilder", (2, 5, 6), {"ln_lstm": True}),
        "coupled": ("CoupledLSTMBuilder", (2, 5, 6), {}),
        "both": ("BiRNNBuilder", (2, 5, 12), {"of": "VanillaLSTMBuilder"}),
        "both_gru": ("BiRNNBuilder", (1, 5, 12), {"of": "GRUBuilder"}),
    }
    rng = np.random.default_rng(0)
    given = {"xs": rng.standard_normal((6, 5)), "ws": rng.standard_normal((6, 12)), "s": rng.standard_normal((4, 6))}
    rnns = {}
    for name, (builder, arguments, options) in cases.items():
        make = globals()[builder]
        extra = {"rnn_builder_factory": globals()[options["of"]]} if "of" in options else options
        rnns[name] = rnn = make(*arguments, dy.ParameterCollection(), **extra)
        for k, p in enumerate(rnn.param_collection().parameters_list()):
            if len(p.shape) == 1:
                p.set_value(p.as_array() + 0.3 * rng.standard_normal(p.shape))
            given[f"{name}/p{k}"] = p.as_array()
    np.savez(tmp_path / "given.npz", **given)
    command = [sys.executable, "-c", DYNET, tmp_path / "given.npz", json.dumps(cases), tmp_path / "found.npz"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = np.load(tmp_path / "found.npz")
    for name, rnn in rnns.items():
        dy.renew_cg()
        parameters = rnn.param_collection().parameters_list()
        if name != "norm":  # there DyNet puts what normalizes outside of the builder's collection
            assert [p.name for p in parameters] == found[f"{name}/names"].tolist()
        xs = [dy.inputVector(x) for x in given["xs"]]
        start = rnn if name.startswith("both") else rnn.initial_state()
        outputs = start.transduce(xs)
        loss = dy.esum([dy.dot_product(dy.inputVector(w[: len(y)]), y) for w, y in zip(given["ws"], outputs)])
        loss.backward()
        close(values(outputs), found[f"{name}/outputs"], 1e-5)
        for k, p in enumerate(parameters):
            np.testing.assert_allclose(p.grad_as_array(), found[f"{name}/g{k}"], rtol=1e-4, atol=1e-5)
        if not name.startswith("both"):
            s = [dy.inputVector(v) for v in given["s"][: 2 * rnn.state_vectors]]
            state = rnn.initial_state(s).add_input(xs[0])
            close(values(state.s()), found[f"{name}/given"], 1e-5)
            close(values(state.set_h(s[:2]).add_input(xs[1]).s()), found[f"{name}/changed"], 1e-5)
