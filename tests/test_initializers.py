"""Initial values: bounds and spreads of every initializer, against figures read off DyNet, and DyNet itself.

DyNet runs in a process of its own, because importing it makes this process flush subnormal numbers to zero.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dynbatch import initializers
from dynbatch.errors import ConfigurationError, ShapeError
from dynbatch.parameters import ParameterCollection


def initial(module: Any, shape: tuple[int, ...], lookup: bool, **arguments: Any) -> np.ndarray:
    """Initial values of a new parameter, in dynbatch or in DyNet."""
    pc = module.ParameterCollection() if isinstance(module, ModuleType) else ParameterCollection()
    return (pc.add_lookup_parameters if lookup else pc.add_parameters)(shape, **arguments).as_array()


# (shape, whether it is a table, arguments of GlorotInitializer or None for the default) and the fan in
# bound = gain * sqrt(6 / fan), as dyNET38 has it.
FANS = [
    ((300, 500), False, None, 800),
    ((20_000,), False, None, 40_000),
    ((300, 40, 5), False, None, 2 * 345 / 3),
    ((5, 5, 32, 16), False, None, 25 * 48),
    ((3, 4, 5, 6, 70), False, None, 2 * 88 / 5),
    ((1000, 64), True, None, 1064),
    ((300, 20, 30), True, None, 2 * 350 / 3),
    ((100, 5, 6, 7), True, None, 30 * 107),
    ((1000, 64), True, {"is_lookup": True}, 128),
    ((100, 64, 32), True, {"is_lookup": True}, 96),
    ((5, 64, 32, 7, 3), True, {"is_lookup": True}, 64 * 32 * 10),
    ((1000, 64), False, {"is_lookup": True}, 2000),
    ((300, 300), False, {"gain": 4.0}, 600 / 16),
]


@pytest.mark.parametrize("shape, lookup, arguments, fan", FANS)
def test_glorot_bounds(shape: tuple[int, ...], lookup: bool, arguments: dict[str, Any] | None, fan: float) -> None:
    init = None if arguments is None else initializers.GlorotInitializer(**arguments)
    check_uniform(initial(None, shape, lookup, init=init), math.sqrt(6 / fan))


@pytest.mark.parametrize("case", range(len(FANS)))
def test_glorot_bounds_are_dynets(dynet: list[list[np.ndarray]], case: int) -> None:
    check_uniform(dynet[0][case], math.sqrt(6 / FANS[case][-1]))


def check_uniform(values: np.ndarray, bound: float) -> None:
    """Uniform in [-bound, bound]: the extremes of thousands of values come close, and the variance is bound^2 / 3."""
    assert 0.99 * bound < values.max() <= bound * (1 + 1e-6)
    assert -0.99 * bound > values.min() >= -bound * (1 + 1e-6)
    assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.03)


# How a 300 x 200 parameter is spread: (init, other arguments) and (mean, standard deviation), as dyNET38 has it.
SPREADS = [
    ("glorot", {}, (0.0, math.sqrt(6 / 500) / math.sqrt(3))),
    ("uniform", {}, (0.0, 1 / math.sqrt(3))),
    ("uniform", {"scale": 0.5}, (0.0, 0.5 / math.sqrt(3))),
    ("normal", {}, (0.0, 1.0)),
    ("normal", {"mean": 1.0, "std": 3.0}, (1.0, 3.0)),
    ("he", {}, (0.0, 0.05)),
    (("UniformInitializer", 0.3), {}, (0.0, 0.3 / math.sqrt(3))),
    (("NormalInitializer",), {}, (0.0, 1.0)),
    (("NormalInitializer", 1.0, 4.0), {}, (1.0, 2.0)),
    (("ConstInitializer", 2.5), {}, (2.5, 0.0)),
    (0.5, {}, (0.5, 0.0)),
    (3, {}, (3.0, 0.0)),
]


@pytest.mark.parametrize("init, arguments, expected", SPREADS)
@pytest.mark.parametrize("lookup", [False, True])
def test_spreads(init: Any, arguments: dict[str, float], expected: tuple[float, float], lookup: bool) -> None:
    check_spread(initial(None, (300, 200), lookup, init=made(initializers, init), **arguments), expected)


@pytest.mark.parametrize("case", range(len(SPREADS)))
@pytest.mark.parametrize("lookup", [False, True])
def test_spreads_are_dynets(dynet: list[list[np.ndarray]], case: int, lookup: bool) -> None:
    check_spread(dynet[1 + lookup][case], SPREADS[case][-1])


def made(module: ModuleType, init: Any) -> Any:
    return getattr(module, init[0])(*init[1:]) if isinstance(init, tuple) else init


def check_spread(values: np.ndarray, expected: tuple[float, float]) -> None:
    mean, deviation = expected
    assert values.mean() == pytest.approx(mean, abs=max(deviation / 40, 1e-6))
    assert values.std() == pytest.approx(deviation, rel=0.03, abs=1e-6)


def write_dynet(path: str) -> None:
    """Write DyNet's initial values to a file: for all `FANS`, and for all `SPREADS` of parameters and of tables."""
    import dynet_config

    dynet_config.set(mem=512, random_seed=1)
    import dynet as dy

    fans = []
    for shape, lookup, arguments, _ in FANS:
        init = None if arguments is None else dy.GlorotInitializer(**arguments)
        fans.append(initial(dy, shape, lookup, init=init))
    spreads = [
        [initial(dy, (300, 200), lookup, init=made(dy, init), **arguments) for init, arguments, _ in SPREADS]
        for lookup in (False, True)
    ]
    Path(path).write_bytes(pickle.dumps([fans, *spreads]))


@pytest.fixture(scope="module")
def dynet(tmp_path_factory: pytest.TempPathFactory) -> list[list[np.ndarray]]:
    """What `write_dynet` writes."""
    if importlib.util.find_spec("dynet") is None:
        pytest.skip("DyNet is not installed")
    path = tmp_path_factory.mktemp("dynet") / "values"
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import test_initializers as t; "
    subprocess.run([sys.executable, "-c", code + "t.write_dynet(sys.argv[1])", str(path)], check=True)
    return pickle.loads(path.read_bytes())


def test_he_follows_the_last_dimension() -> None:
    for shape in [(100, 400), (400, 100), (40, 50, 60), (20_000,)]:
        assert initial(None, shape, False, init="he").var() == pytest.approx(0.5 / shape[-1], rel=0.05)


def test_identity_and_saxe() -> None:
    np.testing.assert_array_equal(initial(None, (7, 7), False, init="identity"), np.eye(7))
    np.testing.assert_array_equal(initial(None, (7, 7), False, init=initializers.IdentityInitializer()), np.eye(7))
    for init, scale in [(initializers.SaxeInitializer(), 1.0), (initializers.SaxeInitializer(2.0), 2.0), ("saxe", 1.0)]:
        matrix = initial(None, (30, 30), False, init=init).astype(np.float64)
        np.testing.assert_allclose(matrix @ matrix.T, scale**2 * np.eye(30), atol=1e-5)


def test_arrays_are_taken_as_they_are() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for init in (array, initializers.NumpyInitializer(array)):
        for lookup in (False, True):
            np.testing.assert_array_equal(initial(None, (2, 3), lookup, init=init), array)


@pytest.mark.parametrize(
    "init", ["identity", "saxe", np.zeros((3, 2)), np.zeros(6), initializers.NumpyInitializer(np.zeros(()))]
)
@pytest.mark.parametrize("lookup", [False, True])
def test_what_does_not_fit_the_shape_is_refused(init: Any, lookup: bool) -> None:
    pc = ParameterCollection()
    add = pc.add_lookup_parameters if lookup else pc.add_parameters
    with pytest.raises(ShapeError, match=r"/W: .*\(2, 3\)"):
        add((2, 3), init=init, name="W")
    assert pc.parameter_count() == 0


def test_unknown_initializers_are_refused() -> None:
    pc = ParameterCollection()
    with pytest.raises(ConfigurationError, match=r"'golrot'.*glorot, he, uniform"):
        pc.add_parameters(3, init="golrot")
    with pytest.raises(TypeError, match="init must be"):
        pc.add_parameters(3, init=object())
    with pytest.raises(ShapeError, match="two dimensions"):
        pc.add_parameters(3, init=initializers.GlorotInitializer(is_lookup=True))
    with pytest.raises(ConfigurationError, match="negative"):
        initializers.NormalInitializer(0, -1)
