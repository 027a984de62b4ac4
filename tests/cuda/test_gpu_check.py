"""The check for machines with a GPU, on the emulator: that it runs to its end, and finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import gpu_check, gpu_programs
from tests.cuda.device import needs_compiler

CHECKOUT = Path(__file__).resolve().parents[2]
WITHOUT_PYTEST = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("pytest", "greenlet", "Cython", "matplotlib"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from bench import gpu_check, gpu_programs, gpu_timing
from tests import random_cells
from tests.ops import op_table
print(len(list(gpu_programs.cases(True))))
"""

pytestmark = [needs_compiler, pytest.mark.cpu]  # it chooses devices itself


def run(*arguments: str, driver: str = "tests.cuda_emulator", **variables: str) -> tuple[int, list[str]]:
    """Exit status and lines of the command."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DYNBATCH_DEVICE", "DYNBATCH_AUTOBATCH")}
    environment |= {"DYNBATCH_CUDA_DRIVER": driver, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "bench.gpu_check", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_small_run_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    status, lines = run("--smoke", "--json", str(path))
    text = "\n".join(lines)
    assert status == 0, text
    assert "card emulator 0" in lines[0]
    assert "compared 17 programs: 0 differences" in lines
    assert len(text) < 12_000
    table = lines[-5:]
    assert table[0].split()[:6] == ["model", "mode", "hidden", "DyNet-like", "cells", "replay"]
    assert [line.split()[:2] for line in table[1:]] == [
        [model, mode] for model in ("treelstm", "birnn") for mode in ("infer", "train")
    ]
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["failures"] == 0 and found["machine"]["card"] == "emulator 0"
    for _, row in (entry for entry in found["models"] if entry[0] == "row"):
        for name in ("cells", "dynet_like", "replay", "device"):
            assert row[name] > 0
        assert ("captured" in row) == (row["mode"] == "infer")
    kernels = [content["kernel"] for kind, content in found["kernels"] if kind == "kernel"]
    assert "gather, rows of 16" in kernels and "fused: softmax" in kernels


def test_a_wrong_kernel_is_found() -> None:
    status, lines = run("--smoke", "--only", "check", driver="tests.broken_driver", BROKEN="wrong:lookup_rows")
    assert status == 1
    assert any(line.startswith("DIFFERS treelstm dynbatch agenda batch 6 float32: loss 0 ") for line in lines)
    assert "DIFFERENCES AND FAULTS" in "\n".join(lines)


def test_it_goes_on_behind_what_takes_the_device_along() -> None:
    status, lines = run("--smoke", "--only", "check", driver="tests.broken_driver", BROKEN="lost:segment_first")
    assert status == 1
    differs = [line for line in lines if line.startswith("DIFFERS")]
    assert len(differs) == 1 and "cells of size 6" in differs[0] and "illegal memory access" in differs[0]
    assert "compared 16 programs: 1 differences" in lines


def test_a_section_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    monkeypatch.setattr(gpu_check, "RESTARTS", 0)
    monkeypatch.setenv("DYNBATCH_CUDA_DRIVER", "tests.broken_driver")
    monkeypatch.setenv("BROKEN", "hangs:lookup_rows")
    assert gpu_check.report("check", gpu_check.findings("check", 0.1, True)) == 1
    assert "its process took too long" in capsys.readouterr().out


def test_without_a_device() -> None:
    status, lines = run(driver="dynbatch.cuda.cupy_driver")
    if status != 2:
        pytest.skip("there is a device")
    assert len(lines) == 1 and lines[0].startswith("bench.gpu_check: ")


def test_it_needs_no_packages_for_development() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYTEST], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.stdout == "17\n", done.stderr


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([1.0, 2.0], ""),
        ([1.0, 2.0 + 1e-12], ""),
        ([1.0, 2.1], r"differs by 1.0e-01 where the largest is 2.0e+00 (1 of 2 elements)"),
        ([1.0, np.nan], "is nan at [1], not 2.0 (1 of 2 elements)"),
        ([1.0], "has shape (1,), not (2,)"),
    ],
)
def test_differences(found: list[float], text: str) -> None:
    assert gpu_programs.difference(np.array([1.0, 2.0]), np.array(found), 1e-9) == text


def test_infinities_are_compared() -> None:
    wanted = np.array([np.inf, np.nan, 1.0])
    assert gpu_programs.difference(wanted, wanted.copy(), 1e-9) == ""
    assert gpu_programs.difference(wanted, np.array([-np.inf, np.nan, 1.0]), 1e-9).startswith("is -inf at [0], not inf")
