"""Settings between tests: every test starts from the defaults, in the NumPy tier, in a fresh graph."""

from __future__ import annotations

import os

import hypothesis
import pytest

import dynbatch as dy
from dynbatch.compiler import ir
from dynbatch.config import Config, config
from dynbatch.cpu import tiers
from dynbatch.cpu.memory import Arena

Arena.poisoned = True
# Who multiplies is measured otherwise, and results differ by rounding from run to run. For the tests' processes too.
os.environ.setdefault("DYNBATCH_BLAS", "own")
GIVEN = {name: getattr(config, name) for name in ("device", "threads")}  # by the environment

TIER = "numpy" if config.device == "cpu" else "cuda"
"""What plans say of batches that are not compiled for the CPU."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``DYNBATCH_DEVICE=cuda`` the tests run on that device, but for those of the CPU backend's own."""
    if GIVEN["device"] != "cpu":
        of_cpu = [item for item in items if item.get_closest_marker("cpu")]
        config.hook.pytest_deselected(items=of_cpu)
        items[:] = [item for item in items if not item.get_closest_marker("cpu")]


# "ci" draws the same examples every time, so that a red build means a change and not bad luck.
# HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=3000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def fresh_settings():
    """The default settings, whatever an earlier test chose, and a graph of that dtype."""
    vars(config).update(vars(Config()), **GIVEN)
    config.entropy = 0  # the same weights every time, as the same examples: a red build means a change
    tiers.set_mode("never")
    dy.renew_cg()
    yield
    vars(config).update(vars(Config()), **GIVEN)
    dy.renew_cg()


@pytest.fixture(params=["never", "always"], ids=["numpy", "compiled"])
def tier(request):
    """Both ways to run a Program. Each kernel takes a good part of a second to compile where it is not cached."""
    tiers.set_mode(request.param)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    """Kernels that Python interprets, in float64; what was made with them is forgotten afterwards."""
    import random_cells  # which needs Hypothesis' strategies

    from dynbatch.cpu import kernels

    monkeypatch.setattr(kernels, "load", random_cells.interpreted)
    known = {program: dict(program.cache) for program in ir._programs.values()}
    for program in known:
        program.cache.clear()
    yield
    dy.renew_cg()
    for program in ir._programs.values():
        program.cache.clear()
        program.cache.update(known.get(program, {}))


@pytest.fixture
def float64():
    """Values and parameters of this test in double precision, with a fixed seed."""
    dy.init(dtype="float64", seed=1)
