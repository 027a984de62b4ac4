"""Kernels that users bring, by numba.cuda: run in numba's simulator, and launched on the driver's stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("simulator_cases.py")


def test_in_numbas_simulator() -> None:
    """In a process of its own: whether it is the simulator is settled when numba is imported."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
