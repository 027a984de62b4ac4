"""Trainers: every rule against plain NumPy, against figures read off DyNet, and against DyNet itself if it is there.

DyNet runs in a process of its own, because importing it makes this process flush subnormal numbers to zero.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dynbatch import trainers
from dynbatch.config import config
from dynbatch.errors import FileFormatError, ValidityError
from dynbatch.parameters import Parameter, ParameterCollection

RULES = (
    "SimpleSGDTrainer",
    "MomentumSGDTrainer",
    "AdagradTrainer",
    "RMSPropTrainer",
    "AdamTrainer",
    "AmsgradTrainer",
)
DEFAULTS = {
    "SimpleSGDTrainer": {"learning_rate": 0.1},
    "MomentumSGDTrainer": {"learning_rate": 0.01, "mom": 0.9},
    "AdagradTrainer": {"learning_rate": 0.1, "eps": 1e-20},
    "RMSPropTrainer": {"learning_rate": 0.001, "eps": 1e-8, "rho": 0.9},
    "AdamTrainer": {"alpha": 0.001, "beta_1": 0.9, "beta_2": 0.999, "eps": 1e-8},
    "AmsgradTrainer": {"alpha": 0.001, "beta_1": 0.9, "beta_2": 0.999, "eps": 1e-8},
}
# Others than the defaults, to see each setting at work; AMSGrad differs from Adam only where the squares decay fast.
SETTINGS = {
    "SimpleSGDTrainer": {"learning_rate": 0.03},
    "MomentumSGDTrainer": {"learning_rate": 0.05, "mom": 0.5},
    "AdagradTrainer": {"learning_rate": 0.05, "eps": 0.1},
    "RMSPropTrainer": {"learning_rate": 0.01, "eps": 0.001, "rho": 0.5},
    "AdamTrainer": {"alpha": 0.01, "beta_1": 0.5, "beta_2": 0.4, "eps": 0.001},
    "AmsgradTrainer": {"alpha": 0.01, "beta_1": 0.5, "beta_2": 0.4, "eps": 0.001},
}
STEPS = 6
SIZES = (1e-10, 1e-5, 1.0, 20.0)  # of the gradients: the first two show epsilons, 20 passes the clipping threshold of 5
TOUCHED = ([0, 1], [1], [3], [0, 3], [1, 1], [0])  # rows of the table that have a gradient, step by step

# (W[0, 0], W[1, 2], table[0, 1], table[1, 0], table[3, 1]) after all steps in dyNET38, sparse, without weight decay.
FIGURES = {
    ("SimpleSGDTrainer", 1e-10): (0.4794255, 0.4121185, 0.6754632, -0.8182771, 0.0336230),
    ("SimpleSGDTrainer", 1e-05): (0.4794253, 0.4121188, 0.6754640, -0.8182768, 0.0336228),
    ("SimpleSGDTrainer", 1.0): (0.4618094, 0.4415534, 0.7508010, -0.7921105, 0.0111590),
    ("SimpleSGDTrainer", 20.0): (0.4695542, 0.4847272, 0.8562478, -0.7366076, -0.0226686),
    ("MomentumSGDTrainer", 1e-10): (0.4794255, 0.4121185, 0.6754632, -0.8182771, 0.0336230),
    ("MomentumSGDTrainer", 1e-05): (0.4794251, 0.4121186, 0.6754633, -0.8182771, 0.0336229),
    ("MomentumSGDTrainer", 1.0): (0.4338399, 0.4249819, 0.6884152, -0.8193209, 0.0232230),
    ("MomentumSGDTrainer", 20.0): (0.3742539, 0.4435653, 0.7064505, -0.8168899, 0.0086914),
    ("AdagradTrainer", 1e-10): (0.4395597, 0.4238968, 0.7286138, -0.8150077, 0.0115554),
    ("AdagradTrainer", 1e-05): (0.4015320, 0.4113695, 0.7604128, -0.8377427, -0.0062727),
    ("AdagradTrainer", 1.0): (0.4015320, 0.4113695, 0.7604128, -0.8377427, -0.0062727),
    ("AdagradTrainer", 20.0): (0.4085531, 0.4126860, 0.7613595, -0.8354595, -0.0070209),
    ("RMSPropTrainer", 1e-10): (0.4794255, 0.4121185, 0.6754632, -0.8182771, 0.0336230),
    ("RMSPropTrainer", 1e-05): (0.4794078, 0.4121479, 0.6755385, -0.8182511, 0.0336006),
    ("RMSPropTrainer", 1.0): (0.4772074, 0.4121552, 0.6781867, -0.8188460, 0.0324252),
    ("RMSPropTrainer", 20.0): (0.4774165, 0.4122010, 0.6782164, -0.8187775, 0.0324017),
    ("AdamTrainer", 1e-10): (0.4794247, 0.4121186, 0.6754636, -0.8182772, 0.0336228),
    ("AdamTrainer", 1e-05): (0.4769513, 0.4116335, 0.6765946, -0.8189122, 0.0329389),
    ("AdamTrainer", 1.0): (0.4768800, 0.4115959, 0.6766378, -0.8189449, 0.0329155),
    ("AdamTrainer", 20.0): (0.4769927, 0.4116206, 0.6766480, -0.8188817, 0.0329082),
    ("AmsgradTrainer", 1e-10): (0.4794247, 0.4121186, 0.6754636, -0.8182772, 0.0336228),
    ("AmsgradTrainer", 1e-05): (0.4769513, 0.4116335, 0.6765946, -0.8189123, 0.0329389),
    ("AmsgradTrainer", 1.0): (0.4768800, 0.4115959, 0.6766378, -0.8189450, 0.0329155),
    ("AmsgradTrainer", 20.0): (0.4769927, 0.4116206, 0.6766480, -0.8188818, 0.0329082),
}
FIGURES_WITH_SETTINGS = {
    "SimpleSGDTrainer": (0.4741407, 0.4209490, 0.6980646, -0.8104271, 0.0268838),
    "MomentumSGDTrainer": (0.4050198, 0.4646561, 0.7205628, -0.8079581, -0.0002579),
    "AdagradTrainer": (0.4439595, 0.4133967, 0.7147593, -0.8252320, 0.0153631),
    "RMSPropTrainer": (0.4739655, 0.4134169, 0.6884478, -0.8198380, 0.0297894),
    "AdamTrainer": (0.4639242, 0.4139329, 0.6860093, -0.8207628, 0.0282368),
    "AmsgradTrainer": (0.4662932, 0.4137455, 0.6860093, -0.8218652, 0.0282066),
}


def wave(shape: tuple[int, ...], shift: float) -> np.ndarray:
    """Numbers in [-1, 1] that anybody can compute again."""
    return np.sin(1.7 * np.arange(math.prod(shape)) + shift).reshape(shape)


def gradients(step: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Of the matrix, and one row for each entry of ``TOUCHED[step]``."""
    return size * wave((2, 3), step), size * wave((len(TOUCHED[step]), 2), 10 + step)


Settings = dict[str, float]


def run_dynbatch(rule: str, size: float, sparse: bool, decay: float, settings: Settings) -> tuple[np.ndarray, ...]:
    """The matrix and the table after some updates."""
    pc = ParameterCollection()
    pc.set_weight_decay_lambda(decay)
    matrix = pc.add_parameters((2, 3), init=wave((2, 3), 0.5))
    table = pc.add_lookup_parameters((4, 2), init=wave((4, 2), 0.7))
    trainer = getattr(trainers, rule)(pc, **settings)
    trainer.set_sparse_updates(sparse)
    for step in range(STEPS):
        dense, rows = gradients(step, size)
        matrix.grad[...] += dense.T
        table.add_gradient(np.array(TOUCHED[step]), rows)
        trainer.update()
    assert not matrix.grad_as_array().any() and not table.grad_as_array().any() and len(table.touched) == 0
    return matrix.as_array(), table.as_array()


def run_dynet(
    dy: ModuleType, rule: str, size: float, sparse: bool, decay: float, settings: Settings
) -> tuple[np.ndarray, ...]:
    """The same in DyNet."""
    pc = dy.ParameterCollection()
    pc.set_weight_decay_lambda(decay)
    matrix = pc.add_parameters((2, 3), init=wave((2, 3), 0.5))
    table = pc.add_lookup_parameters((4, 2), init=wave((4, 2), 0.7))
    trainer = getattr(dy, rule)(pc, **settings)
    trainer.set_sparse_updates(sparse)
    for step in range(STEPS):
        dense, rows = gradients(step, size)
        dy.renew_cg()
        terms = [dy.dot_product(table[i], dy.inputVector(row)) for i, row in zip(TOUCHED[step], rows, strict=True)]
        loss = dy.esum([dy.sum_elems(dy.cmult(matrix, dy.inputTensor(dense))), *terms])
        loss.forward()
        loss.backward()
        trainer.update()
    dy.renew_cg()
    # With a weight decay as_array() gives values that DyNet has yet to scale; expressions give what models see.
    return (matrix * 1.0).npvalue(), np.stack([table[i].npvalue() for i in range(4)])


def run_numpy(rule: str, size: float, sparse: bool, decay: float, settings: Settings) -> tuple[np.ndarray, ...]:
    """The same as the rules' papers write them, one array at a time in float64, with DyNet's defaults."""
    with_defaults = {**DEFAULTS[rule], **settings}
    lr, *others = with_defaults.values()
    values = [wave((2, 3), 0.5), wave((4, 2), 0.7)]
    mean, squares, largest = ([np.zeros_like(x) for x in values] for _ in range(3))
    for step in range(STEPS):
        dense, rows = gradients(step, size)
        sparse_gradient = np.zeros((4, 2))
        np.add.at(sparse_gradient, TOUCHED[step], rows)
        norm = math.sqrt((dense**2).sum() + (sparse_gradient**2).sum())
        clip = 5 / norm if norm > 5 else 1.0
        for k, gradient in enumerate((dense * clip, sparse_gradient * clip)):
            used = np.unique(TOUCHED[step]) if sparse and k == 1 else slice(None)
            x, m, s, top, g = (a[used] for a in (values[k], mean[k], squares[k], largest[k], gradient))
            if rule == "SimpleSGDTrainer":
                x = x - lr * g
            elif rule == "MomentumSGDTrainer":
                m = others[0] * m - lr * g
                x = x + m
            elif rule == "AdagradTrainer":
                s = s + g**2
                x = x - lr * g / np.sqrt(s + others[0])
            elif rule == "RMSPropTrainer":
                eps, rho = others
                s = rho * s + (1 - rho) * g**2
                x = x - lr * g / np.sqrt(s + eps)
            else:
                beta_1, beta_2, eps = others
                m = beta_1 * m + (1 - beta_1) * g
                s = beta_2 * s + (1 - beta_2) * g**2
                top = np.maximum(top, s)
                unbiased = math.sqrt(1 - beta_2 ** (step + 1)) / (1 - beta_1 ** (step + 1))
                x = x - lr * unbiased * m / (np.sqrt(top if rule == "AmsgradTrainer" else s) + eps)
            values[k][used], mean[k][used], squares[k][used], largest[k][used] = x, m, s, top
            values[k] *= 1 - decay
    return tuple(values)


def assert_same(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def chosen(values: tuple[np.ndarray, ...]) -> np.ndarray:
    """The entries that the figures are of."""
    matrix, table = values
    return np.array([matrix[0, 0], matrix[1, 2], table[0, 1], table[1, 0], table[3, 1]])


def run_here(code: str, *arguments: object) -> None:
    """Run Python code in a fresh process that can import this module."""
    here = Path(__file__).parent
    start = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; from test_trainers import *; "
    subprocess.run([sys.executable, "-c", start + code, *map(str, arguments)], check=True)


def write_dynet(path: str) -> None:
    """Run all `CASES` in DyNet, and write what comes out to a file."""
    import dynet_config

    dynet_config.set(mem=512, random_seed=1)
    import dynet

    results = {}
    for case in CASES:
        *plain, set_up = case
        results[case] = run_dynet(dynet, *plain, SETTINGS[case[0]] if set_up else {})
    Path(path).write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def dynet(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[np.ndarray, ...]]:
    """What DyNet gives for each of the `CASES`."""
    if importlib.util.find_spec("dynet") is None:
        pytest.skip("DyNet is not installed")
    path = tmp_path_factory.mktemp("dynet") / "results"
    run_here("write_dynet(sys.argv[1])", path)
    return pickle.loads(path.read_bytes())


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "dtype", "float64")


# The rules. float32 keeps 6e-8 of a value near 1; six updates add up to less than 3e-7.

CASES = list(itertools.product(RULES, SIZES, (True, False), (0.0, 0.01), (False, True)))


@pytest.mark.parametrize("run", [run_dynbatch, run_numpy])
@pytest.mark.parametrize("rule, size", FIGURES)
def test_rules_give_dynets_figures(run: Any, rule: str, size: float) -> None:
    np.testing.assert_allclose(chosen(run(rule, size, True, 0.0, {})), FIGURES[rule, size], rtol=0, atol=3e-7)


@pytest.mark.parametrize("run", [run_dynbatch, run_numpy])
@pytest.mark.parametrize("rule", RULES)
def test_settings_give_dynets_figures(run: Any, rule: str) -> None:
    found = chosen(run(rule, 1.0, True, 0.0, SETTINGS[rule]))
    np.testing.assert_allclose(found, FIGURES_WITH_SETTINGS[rule], rtol=0, atol=3e-7)


@pytest.mark.parametrize("rule, size, sparse, decay, set_up", CASES)
def test_rules_are_dynets(
    dynet: dict[Any, tuple[np.ndarray, ...]], rule: str, size: float, sparse: bool, decay: float, set_up: bool
) -> None:
    settings = SETTINGS[rule] if set_up else {}
    expected = dynet[rule, size, sparse, decay, set_up]
    assert_same(run_dynbatch(rule, size, sparse, decay, settings), expected, 3e-7)


@pytest.mark.parametrize("rule, size, sparse, decay, set_up", CASES)
def test_rules_in_float32(rule: str, size: float, sparse: bool, decay: float, set_up: bool) -> None:
    settings = SETTINGS[rule] if set_up else {}
    expected = run_numpy(rule, size, sparse, decay, settings)
    assert_same(run_dynbatch(rule, size, sparse, decay, settings), expected, 3e-7)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule, size, sparse, decay, set_up", CASES)
def test_rules_in_float64(rule: str, size: float, sparse: bool, decay: float, set_up: bool) -> None:
    settings = SETTINGS[rule] if set_up else {}
    expected = run_numpy(rule, size, sparse, decay, settings)
    assert_same(run_dynbatch(rule, size, sparse, decay, settings), expected, 1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_defaults_are_dynets(rule: str) -> None:
    pc = ParameterCollection()
    trainer = getattr(trainers, rule)(pc)
    by_name = getattr(trainers, rule)(pc, **DEFAULTS[rule])
    in_order = getattr(trainers, rule)(pc, *DEFAULTS[rule].values())
    assert vars(trainer) == vars(by_name) == vars(in_order)
    assert trainer.learning_rate == next(iter(DEFAULTS[rule].values()))
    assert trainer.get_clip_threshold() == 5 and trainer.sparse_updates and pc.get_weight_decay() == 0


def test_amsgrad_has_both_spellings() -> None:
    assert trainers.AMSGradTrainer is trainers.AmsgradTrainer


# Clipping, weight decay, frozen parameters, parts of collections


def test_the_threshold_is_for_the_norm_of_everything_together() -> None:
    pc = ParameterCollection()
    w, b = pc.add_parameters((2, 3), init=0.0), pc.add_parameters(5, init=0.0)
    table = pc.add_lookup_parameters((4, 2), init=0.0)
    trainer = trainers.SimpleSGDTrainer(pc, 1.0)
    w.grad[...] = 6.0
    b.grad[...] = -2.0
    table.add_gradient(np.array([2]), np.array([[3.0, 4.0]]))
    norm = math.sqrt(6 * 36 + 5 * 4 + 25)
    trainer.update()
    for p, g in ((w, 6.0), (b, -2.0)):
        np.testing.assert_allclose(p.as_array(), -g * 5 / norm, rtol=1e-6)
    np.testing.assert_allclose(table.row_as_array(2), np.array([-3.0, -4.0]) * 5 / norm, rtol=1e-6)
    assert not table.rows_as_array([0, 1, 3]).any()


def test_a_norm_at_the_threshold_is_not_clipped_and_zero_turns_clipping_off() -> None:
    pc = ParameterCollection()
    p = pc.add_parameters(2, init=0.0)
    trainer = trainers.SimpleSGDTrainer(pc, 1.0)
    moved = []
    for threshold, gradient in ((5.0, [3.0, 4.0]), (0.0, [30.0, 40.0]), (-1.0, [30.0, 40.0]), (2.5, [3.0, 4.0])):
        trainer.set_clip_threshold(threshold)
        assert trainer.get_clip_threshold() == max(threshold, 0.0)
        p.zero()
        p.grad[...] = gradient
        trainer.update()
        moved.append((-p.as_array()).tolist())
    assert moved == [[3.0, 4.0], [30.0, 40.0], [30.0, 40.0], [1.5, 2.0]]


@pytest.mark.parametrize("sparse", [True, False])
def test_weight_decay_reaches_rows_without_a_gradient(sparse: bool) -> None:
    pc = ParameterCollection()
    pc.set_weight_decay_lambda(0.25)
    p, frozen = pc.add_parameters(2, init=1.0), pc.add_parameters(2, init=1.0, update=False)
    table = pc.add_lookup_parameters((3, 2), init=1.0)
    frozen_table = pc.add_lookup_parameters((3, 2), init=1.0, update=False)
    trainer = trainers.SimpleSGDTrainer(pc, 0.5)
    trainer.set_sparse_updates(sparse)
    table.add_gradient(np.array([1]), np.array([[1.0, 1.0]]))
    trainer.update()
    np.testing.assert_array_equal(p.as_array(), [0.75, 0.75])
    np.testing.assert_array_equal(table.as_array(), [[0.75, 0.75], [0.375, 0.375], [0.75, 0.75]])
    assert (frozen.as_array() == 1).all() and (frozen_table.as_array() == 1).all()


def test_frozen_parameters_stay_and_do_not_count() -> None:
    pc = ParameterCollection()
    p, frozen = pc.add_parameters(2, init=0.0), pc.add_parameters(3, init=1.0, update=False)
    table = pc.add_lookup_parameters((4, 2), init=1.0, update=False)
    trainer = trainers.AdamTrainer(pc)
    p.grad[...] = 1.0
    frozen.grad[...] = np.inf
    table.add_gradient(np.array([1]), np.full((1, 2), np.nan))
    trainer.update()
    assert (p.as_array() != 0).all() and (frozen.as_array() == 1).all() and (table.as_array() == 1).all()
    assert not frozen.grad_as_array().any() and not table.grad_as_array().any() and len(table.touched) == 0
    frozen.update = table.update = True
    trainer.update()
    assert (frozen.as_array() == 1).all(), "what was dropped is not applied later"


def test_a_trainer_of_a_subcollection_leaves_the_rest_alone() -> None:
    pc = ParameterCollection()
    sub = pc.add_subcollection()
    outside, inside = pc.add_parameters(2, init=1.0), sub.add_parameters(2, init=1.0)
    table, own_table = pc.add_lookup_parameters((3, 2), init=1.0), sub.add_lookup_parameters((3, 2), init=1.0)
    for p in (outside, inside):
        p.grad[...] = 1.0
    for t in (table, own_table):
        t.add_gradient(np.array([1]), np.ones((1, 2)))
    version = pc.version
    trainers.SimpleSGDTrainer(sub, 0.5).update()
    assert (inside.as_array() == 0.5).all() and (own_table.row_as_array(1) == 0.5).all()
    assert (outside.as_array() == 1).all() and (table.as_array() == 1).all()
    assert outside.grad_as_array().all() and table.touched.tolist() == [1], "their gradients wait for their trainer"
    assert pc.version > version


@pytest.mark.parametrize("rule", RULES)
def test_parameters_may_be_added_between_updates(rule: str) -> None:
    """The old ones keep what the rule remembers of them, the new ones start afresh."""

    def train(late: bool) -> list[np.ndarray]:
        pc = ParameterCollection()
        old, trainer, new = pc.add_parameters(40, init=wave((40,), 0.0)), None, []
        trainer = getattr(trainers, rule)(pc)
        for step in range(4):
            if step == (2 if late else 0):
                new = [pc.add_parameters((5, 9), init=wave((5, 9), 1.0)), pc.add_lookup_parameters((3, 2), init=0.0)]
            old.grad[...] = 0.1 * wave((40,), step)
            if step >= 2:
                new[0].grad[...] = 0.1 * wave((9, 5), step)
                new[1].add_gradient(np.array([step % 3]), wave((1, 2), step))
            trainer.update()
        return [p.as_array() for p in (old, *new)]

    early, late = train(False), train(True)
    np.testing.assert_array_equal(early[0], late[0])
    if rule in ("SimpleSGDTrainer", "AdagradTrainer"):  # elsewhere updates without a gradient move or age something
        np.testing.assert_array_equal(early[1], late[1])
    assert np.isfinite(late[1]).all() and late[2].any()


def test_rows_without_a_gradient_keep_every_bit() -> None:
    generator = np.random.default_rng(0)
    pc = ParameterCollection()
    table = pc.add_lookup_parameters((50, 7))
    trainer = trainers.AdamTrainer(pc)
    for _ in range(3):
        before = table.as_array()
        ids = np.unique(generator.integers(0, 50, 12))
        table.add_gradient(ids, generator.standard_normal((len(ids), 7)))
        trainer.update()
        changed = (table.as_array() != before).any(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(changed), ids)


def test_an_update_without_gradients_is_an_update() -> None:
    pc = ParameterCollection()
    p = pc.add_parameters(2, init=1.0)
    pc.add_lookup_parameters((3, 2), init=1.0)
    trainer = trainers.MomentumSGDTrainer(pc, 0.1, 0.5)
    trainer.update()
    assert (p.as_array() == 1).all() and trainer.updates == 1
    p.grad[...] = 1.0
    trainer.update()
    trainer.update()
    np.testing.assert_allclose(p.as_array(), 1 - 0.1 - 0.05, rtol=1e-6)
    trainers.AdamTrainer(ParameterCollection()).update()


def test_averages_do_not_decay_into_subnormal_numbers() -> None:
    """0.9 times the 5 smallest numbers rounds to themselves, so that they would stay, and slow down every update."""
    run_here("check_subnormal_numbers()")  # where no other library has made the processor flush them


def check_subnormal_numbers() -> None:
    assert np.float32(1e-39) * np.float32(0.5) > 0
    for rule in ("MomentumSGDTrainer", "RMSPropTrainer", "AdamTrainer", "AmsgradTrainer"):
        pc = ParameterCollection()
        p = pc.add_parameters(40)
        trainer = getattr(trainers, rule)(pc)
        p.grad[...] = 1e-18
        for _ in range(1200):
            trainer.update()
        for name, state in trainer.state().items():
            if "/" in name:
                assert ((state == 0) | (abs(state) >= np.finfo(np.float32).tiny)).all(), (rule, name)


# Restart, status, refusals


@pytest.mark.parametrize(
    "rule, steps",
    [
        ("MomentumSGDTrainer", (0.01, 0.019)),
        ("AdamTrainer", (0.00058115, 0.00073308)),  # not 0.001: the bias correction goes on from the fourth update
        ("AmsgradTrainer", (0.00058115, 0.00073308)),
    ],
)
def test_restart_forgets_averages_but_not_the_number_of_updates(rule: str, steps: tuple[float, float]) -> None:
    """The steps are dyNET38's after three updates and a restart."""
    pc = ParameterCollection()
    p = pc.add_parameters(2, init=0.0)
    trainer = getattr(trainers, rule)(pc)
    for _ in range(3):
        p.grad[...] = [1.0, -2.0]
        trainer.update()
    trainer.restart()
    for step in steps:
        p.zero()
        p.grad[...] = [1.0, -2.0]
        trainer.update()
        assert p.as_array()[0] == pytest.approx(-step, rel=1e-4)
    rate = trainer.learning_rate
    trainer.restart()
    assert trainer.learning_rate == rate
    trainer.restart(0.3)
    assert trainer.learning_rate == 0.3


def test_learning_rate_can_be_set() -> None:
    pc = ParameterCollection()
    p = pc.add_parameters(2, init=0.0)
    trainer = trainers.SimpleSGDTrainer(pc)
    trainer.learning_rate = 0.5
    p.grad[...] = 1.0
    trainer.update()
    assert (p.as_array() == -0.5).all()
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == 0.25


def test_status_counts_since_the_last_call(capsys: pytest.CaptureFixture[str]) -> None:
    pc = ParameterCollection()
    p = pc.add_parameters(2)
    trainer = trainers.SimpleSGDTrainer(pc, 0.3)
    for gradient in (1.0, 100.0, 1.0):
        p.grad[...] = gradient
        trainer.update()
    trainer.status()
    trainer.status()
    assert capsys.readouterr().err == "[lr=0.3 clips=1 updates=3] [lr=0.3 clips=0 updates=0] "


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("threshold", [5.0, 0.0])
def test_a_bad_gradient_changes_nothing(rule: str, bad: float, threshold: float) -> None:
    pc = ParameterCollection()
    pc.set_weight_decay_lambda(0.1)
    w, b = pc.add_parameters((3, 4), name="W"), pc.add_parameters(3, name="b")
    table = pc.add_lookup_parameters((5, 2), name="words")
    trainer = getattr(trainers, rule)(pc)
    trainer.set_clip_threshold(threshold)

    def everything() -> list[np.ndarray]:
        values = [w.as_array(), b.as_array(), table.as_array(), np.array(pc.version)]
        return [*values, w.grad_as_array(), b.grad_as_array(), table.grad_as_array(), *trainer.state().values()]

    for p in (w, b):
        p.grad[...] = 0.5
    trainer.update()
    for p in (w, b):
        p.grad[...] = 0.5
    table.add_gradient(np.array([4]), np.array([[1.0, bad]]))
    before = everything()
    with pytest.raises(ValidityError, match=rf"{bad}.*not finite: /words\. .*check_validity.*reset_gradient"):
        trainer.update()
    for now, then in zip(everything(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    pc.reset_gradient()
    trainer.update()
    assert np.isfinite(w.as_array()).all() and trainer.updates == 2


@pytest.mark.usefixtures("float64")
def test_squares_that_overflow_are_told_apart() -> None:
    pc = ParameterCollection()
    pc.add_parameters(2).grad[...] = 1e200
    with pytest.raises(ValidityError, match="overflow"):
        trainers.SimpleSGDTrainer(pc).update()


def test_large_float32_gradients_are_clipped_not_refused() -> None:
    pc = ParameterCollection()
    p = pc.add_parameters(2, init=0.0)
    p.grad[...] = 1e30
    trainers.SimpleSGDTrainer(pc, 1.0).update()
    np.testing.assert_allclose(p.as_array(), -5 / math.sqrt(2), rtol=1e-6)


# State


def model() -> tuple[ParameterCollection, list[Any]]:
    pc = ParameterCollection()
    sub = pc.add_subcollection("sub")
    return pc, [
        pc.add_parameters((5, 3), init=wave((5, 3), 0.0), name="W"),
        sub.add_lookup_parameters((6, 2, 3), init=wave((6, 2, 3), 1.0), name="words"),
        sub.add_parameters(7, init=wave((7,), 2.0), name="b"),
    ]


def train(trainer: trainers.Trainer, parameters: list[Any], steps: range) -> None:
    for step in steps:
        for k, p in enumerate(parameters):
            if isinstance(p, Parameter):
                p.grad[...] = wave(p.grad.shape, step + k)
            else:
                ids = np.array([step % 6, (3 * step) % 6])
                p.add_gradient(ids, wave((2, *p.type.storage), step))
        trainer.update()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sparse", [True, False])
def test_training_goes_on_bit_equal_from_a_state(rule: str, sparse: bool) -> None:
    pc, parameters = model()
    trainer = getattr(trainers, rule)(pc, **SETTINGS[rule])
    trainer.set_sparse_updates(sparse)
    trainer.set_clip_threshold(2.5)
    train(trainer, parameters, range(4))
    trainer.learning_rate = 0.017
    state, values = trainer.state(), [p.as_array() for p in parameters]
    train(trainer, parameters, range(4, 9))

    again, others = model()
    for p, value in zip(others, values, strict=True):
        p.set_value(value) if isinstance(p, Parameter) else p.init_from_array(value)
    resumed = getattr(trainers, rule)(again)
    resumed.load_state(state)
    assert resumed.learning_rate == 0.017 and resumed.updates == 4 and resumed.sparse_updates == sparse
    train(resumed, others, range(4, 9))
    for p, q in zip(parameters, others, strict=True):
        np.testing.assert_array_equal(p.as_array(), q.as_array())
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, resumed.state()[name])


def test_a_state_is_a_copy_in_the_users_shapes() -> None:
    pc, parameters = model()
    trainer = trainers.AdamTrainer(pc)
    before = trainer.state()
    assert before["AdamTrainer.mean/W"].shape == (5, 3) and before["AdamTrainer.squares/sub/words"].shape == (6, 2, 3)
    parameters[0].grad[...] = np.arange(15).reshape(3, 5) / 100
    trainer.update()
    assert not before["AdamTrainer.mean/W"].any()
    np.testing.assert_allclose(trainer.state()["AdamTrainer.mean/W"], np.arange(15).reshape(3, 5).T / 1000, rtol=1e-5)


def test_a_state_that_does_not_fit_is_refused_whole() -> None:
    pc, parameters = model()
    trainer = trainers.AdamTrainer(pc)
    train(trainer, parameters, range(2))
    before = trainer.state()
    with pytest.raises(FileFormatError, match=r"AdagradTrainer\.squares/W: not used by this trainer"):
        trainer.load_state(trainers.AdagradTrainer(pc).state())
    smaller = {**trainers.AdamTrainer(pc).state(), "AdamTrainer.mean/W": np.zeros((3, 5))}
    del smaller["AdamTrainer.squares/sub/b"]
    with pytest.raises(FileFormatError) as caught:
        trainer.load_state(smaller)
    assert "AdamTrainer.mean/W: shape (3, 5), and (5, 3) here" in str(caught.value)
    assert "AdamTrainer.squares/sub/b: missing" in str(caught.value)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name])
