"""Phases and alignment lower the number of batches under depth-based batching, and change no value."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import dynbatch as dy

LENGTHS = [2, 5, 3, 7]


class Translator:
    """An encoder and a decoder over sentences of unequal length, with one cell for both (as a shared network has)."""

    def __init__(self) -> None:
        collection = dy.ParameterCollection()
        self.E = collection.add_lookup_parameters((20, 6))
        self.W, self.U = collection.add_parameters((6, 6)), collection.add_parameters((6, 6))

    @dy.cell
    def step(self, h, x):
        return dy.tanh(self.W * h + self.U * x)

    @dy.cell
    def refine(self, h):
        return dy.logistic(self.U * h)


def chain(model: Translator, h, length: int):
    for i in range(length):
        h = model.step(h, model.E[i])
    return h


def run(build, strategy: str) -> tuple[float, int]:
    dy.renew_cg()
    with dy.autobatch(strategy):
        value = build().value()
    return value, dy.plan().batches


def encode_decode(model: Translator, phases: bool):
    def phase(name):
        return dy.phase(name) if phases else contextlib.nullcontext()

    outputs = []
    for length in LENGTHS:
        with phase("encode"):
            h = chain(model, model.E[length], length)
        with phase("decode"):
            outputs.append(chain(model, model.refine(h), 3))
    return dy.sum_elems(dy.esum(outputs))


def branches(model: Translator, aligned: bool):
    outputs = []
    for k in range(6):
        h = model.E[k]
        if k % 2:
            h = model.refine(h)
        elif aligned:
            h = dy.align(h)
        outputs.append(chain(model, h, 4))
    return dy.sum_elems(dy.esum(outputs))


@pytest.fixture
def model() -> Translator:
    dy.init(dtype="float64", seed=1)
    return Translator()


def test_phases_keep_an_encoder_and_a_decoder_apart(model: Translator) -> None:
    plain, mixed = run(lambda: encode_decode(model, False), "depth")
    staged, apart = run(lambda: encode_decode(model, True), "depth")
    assert staged == pytest.approx(plain, rel=1e-12)
    # lookups and 7 steps; lookups, a refinement and 3 steps; the sum and its elements
    assert apart == (1 + 7) + (1 + 1 + 3) + 2
    assert mixed > apart


def test_alignment_lines_up_after_a_branch(model: Translator) -> None:
    plain, crooked = run(lambda: branches(model, False), "depth")
    straight, lined_up = run(lambda: branches(model, True), "depth")
    assert straight == pytest.approx(plain, rel=1e-12)
    assert lined_up == 1 + 1 + 4 + 2
    assert crooked == lined_up + 1


@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
def test_values_and_gradients_do_not_depend_on_phases(model: Translator, strategy: str) -> None:
    found = []
    for phases in (False, True):
        dy.renew_cg()
        loss = encode_decode(model, phases)
        with dy.autobatch(strategy):
            loss.backward()
        found.append((loss.value(), model.W.grad_as_array(), model.U.grad_as_array()))
        model.W.root.reset_gradient()
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-11)


def test_a_phase_holds_in_later_graphs_and_values_asked_midway(model: Translator) -> None:
    with dy.phase("decode"):
        dy.renew_cg()
        h = chain(model, model.E[0], 2)
        first = h.npvalue()
        with dy.phase("encode"):  # entered later: it comes later, also where it was meant to come first
            k = chain(model, h, 2)
    assert np.isfinite((k + h).npvalue()).all()
    np.testing.assert_array_equal(first, h.npvalue())


def test_what_a_phase_uses_decides_where_outside_nodes_run(model: Translator) -> None:
    dy.renew_cg()
    with dy.phase("one"):
        a = chain(model, model.E[0], 2)
    b = model.refine(a)
    with dy.phase("two"):
        c = chain(model, b, 2)
    d = model.refine(c) + b
    with dy.autobatch("depth"):
        value = d.npvalue()
    dy.renew_cg()
    b = model.refine(chain(model, model.E[0], 2))
    np.testing.assert_allclose(value, (model.refine(chain(model, b, 2)) + b).npvalue(), rtol=1e-12)


def test_align_refuses_a_negative_count(model: Translator) -> None:
    with pytest.raises(ValueError, match="negative"):
        dy.align(model.E[0], -1)


def test_a_static_structure_keeps_its_phases(model: Translator) -> None:
    @dy.static
    def translate(length):
        with dy.phase("encode"):
            h = chain(model, model.E[length], length)
        with dy.phase("decode"):
            return chain(model, dy.align(model.refine(h)), 3)

    def both():
        return dy.sum_elems(dy.esum([translate(length) for length in LENGTHS]))

    recorded, replayed = run(both, "depth"), run(both, "depth")
    assert recorded == replayed
    assert recorded[1] == run(lambda: encode_decode(model, True), "depth")[1]
    assert translate.cache_info().hits == len(LENGTHS)
