"""The sources of the fixed kernels: all of them are listed, and each is compiled once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dynbatch
from dynbatch.cuda import launches, sources
from tests.cuda.device import Device, needs_compiler

FOLDER = Path(dynbatch.__file__).parent / "cuda" / "kernels"


def test_every_source_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(sources.FILES)
    kernels = [kernel for file in sources.FILES.values() for kernel in file]
    assert len(set(kernels)) == len(kernels)


@needs_compiler
@pytest.mark.parametrize("file", sources.FILES)
def test_every_kernel_is_listed(file: str) -> None:
    device = Device("float32")
    for name in sources.FILES[file]:
        assert device.kernels.fixed(name) is device.kernels.fixed(name)
    text = (FOLDER / f"{file}.cu").read_text(encoding="utf-8")
    made = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)[\s\\]*)?(\w+)\(", text)
    made += re.findall(r"^(?:LINE_KERNEL|RULE|REDUCTION|GATHER_PRODUCT)\((\w+),", text, re.MULTILINE)
    assert set(made) - {"name"} == set(sources.FILES[file])


def test_teams_fit_rows() -> None:
    """A power of two of threads, no more than a row has use for; several small ones make a block."""
    for width in (1, 2, 3, 31, 32, 33, 128, 129, 1000, 10**6):
        for vector in (1, 2, 4):
            launch = launches.teams(1000, width, vector)
            team, together, _ = launch.block
            assert team & (team - 1) == 0 and team <= launches.LARGEST_TEAM
            assert team == 1 or (team // 2) * vector < width
            assert together == 1 or (team <= 32 and team * together <= 128)
            assert launch.grid[0] * together >= 1000 > (launch.grid[0] - 1) * together


def test_slices_are_of_the_size_that_the_kernel_has() -> None:
    assert f"SLICE = {launches.SLICE};" in (FOLDER / "sums.cu").read_text(encoding="utf-8")
