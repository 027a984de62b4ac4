"""The suite of the CUDA backend, without a GPU: ``python -m tests.on_device [ARGUMENTS OF PYTEST]``.

First the tests in ``tests/cuda``. Then tests that are not of one backend run with ``device="cuda"`` on the emulator,
the threads of each block in shuffled order; without g++ these do not run, which one line says.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import cuda_emulator

FILES = [
    "tests/ops", "tests/test_cell.py", "tests/test_differential.py", "tests/test_dynet_agreement.py",
    "tests/test_errors.py", "tests/test_guards.py", "tests/test_initializers.py", "tests/test_map.py",
    "tests/test_parameters.py", "tests/test_phases.py", "tests/test_reuse.py", "tests/test_rnn.py", "tests/test_run.py",
    "tests/test_serialization.py", "tests/test_static.py", "tests/test_tracing.py", "tests/test_trainers.py",
    "tests/test_treelstm.py",
]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run them; returns the exit status."""
    status = subprocess.call([sys.executable, "-m", "pytest", "tests/cuda", *arguments])
    if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return status
    if not cuda_emulator.available():
        print("tests.on_device: no more is run, since the emulator of a CUDA device needs g++")
        return 0
    os.environ["DYNBATCH_DEVICE"] = "cuda"
    os.environ["DYNBATCH_CUDA_DRIVER"] = "tests.cuda_emulator"
    os.environ.setdefault("DYNBATCH_EMULATOR_SEED", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    status = pytest.main([*FILES, *arguments])
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
