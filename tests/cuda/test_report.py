"""The report of what kernels cost: they compile for a real architecture, and none spills."""

from __future__ import annotations

import pytest

from dynbatch.cuda import report
from dynbatch.errors import CompileError, DeviceError


@pytest.fixture
def architectures() -> list[int]:
    try:
        return report.architectures()
    except DeviceError as error:
        pytest.skip(str(error))


def test_every_kernel_compiles_and_none_spills(architectures: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """In float32 and for the newest architecture; the command itself does all."""
    assert report.main(["--dtype", "float32", "--arch", str(architectures[-1])]) == 0
    printed = capsys.readouterr().out
    for name in ("sums.cu sum_edges", "Cells.compose, kernel 0", "Cells.residual's gradient, kernel 0"):
        assert name in printed
    assert " 0 of them spill registers" in printed


@pytest.mark.usefixtures("architectures")
def test_a_spill_is_seen() -> None:
    """A kernel that is allowed 32 registers, since two blocks of 1024 threads fit into a multiprocessor of 2048."""
    terms = " + ".join(f"x[{k}] * y{k % 7}" for k in range(60))
    lines = "".join(f"float y{k} = x[{k + 100}];" for k in range(60))
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) few(float* x) {{ {lines} __syncthreads(); '
    stores = "".join(f"x[{k}] = y{k} + y{59 - k};" for k in range(60))
    (usage,) = report.compile_for(f"{text} x[0] = {terms}; {stores} }}", 80).values()
    assert usage.spilled > 0 and "SPILLS" in str(usage)


def test_messages_of_the_compiler(architectures: list[int]) -> None:
    with pytest.raises(CompileError, match="nonsense"):
        report.compile_for("nonsense", architectures[0])
