"""The kernels' tests in float32, and plans on a device, in a process in which AddressSanitizer watches every access."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda.device import needs_compiler
from tests.cuda_emulator import asan

HERE = Path(__file__).parent
FILES = ["test_rows_and_sums.py", "test_shape_kernels.py", "test_product_kernels.py", "test_trainer_kernels.py",
         "test_cuda_codegen.py", "test_device.py"]  # fmt: skip


@needs_compiler
def test_no_kernel_touches_what_it_must_not() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not float64"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)], env=os.environ | asan.environment(),
        cwd=HERE.parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
