"""Every op that DyNet has gives what DyNet gives, in float32: values, shapes and gradients."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import dynet_cases
import numpy as np
import pytest

import dynbatch as dy

if importlib.util.find_spec("dynet") is None:  # not importorskip: DyNet's state is global, it stays in its process
    pytest.skip("DyNet is not installed (make setup EXTRAS=bench)", allow_module_level=True)

FAULTS_OF_DYNET = {"silu_beta: gradient 0"}
"""Where DyNet's gradient is not that of its value, by finite differences: silu with a beta other than one."""

NAMES = [*dynet_cases.CASES, *dynet_cases.LOOKUPS]


@pytest.fixture(scope="module")
def of_dynet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What DyNet computes, in a process of its own."""
    path = tmp_path_factory.mktemp("dynet") / "results.npz"
    command = [sys.executable, str(Path(dynet_cases.__file__)), "dynet", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return dict(np.load(path))


@pytest.fixture(scope="module")
def of_dynbatch() -> dict[str, np.ndarray]:
    return dynet_cases.evaluate(dy)


@pytest.mark.parametrize("name", NAMES)
def test_agreement(name: str, of_dynet: dict[str, np.ndarray], of_dynbatch: dict[str, np.ndarray]) -> None:
    keys = [key for key in of_dynet if key.startswith(f"{name}: ")]
    assert keys
    assert f"{name}: error" not in of_dynbatch, of_dynbatch[f"{name}: error"]
    assert f"{name}: error" not in of_dynet, of_dynet[f"{name}: error"]
    for key in sorted(set(keys) - FAULTS_OF_DYNET, key=lambda k: not k.endswith("shape")):
        actual, wanted = of_dynbatch[key], of_dynet[key]
        assert actual.shape == wanted.shape, key
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5, err_msg=key)
