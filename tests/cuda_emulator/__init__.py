"""A CUDA device for tests that is not there: the kernels' own sources, compiled by g++ and run on the CPU.

``DYNBATCH_CUDA_DRIVER=tests.cuda_emulator`` makes it the device ``"cuda"``. In the environment:

- ``DYNBATCH_EMULATOR_SEED``: in which order blocks, and threads between two barriers, run; 0 is the natural one.
- ``DYNBATCH_EMULATOR_ASAN=1``: kernels are checked by AddressSanitizer, whose library must be loaded before Python
  starts; `asan.environment` names the variables.
"""

from __future__ import annotations

from tests.cuda_emulator.build import available
from tests.cuda_emulator.driver import Emulator

__all__ = ["Emulator", "available", "count", "driver"]


def count() -> int:
    """How many devices there are: two, so that going from one to another can be tested."""
    return 2


def driver(index: int) -> Emulator:
    """A driver of one of the devices."""
    return Emulator(index)
