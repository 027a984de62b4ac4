"""Prints the variables for AddressSanitizer: `env $(python -m tests.cuda_emulator) python -m pytest tests/cuda`."""

from __future__ import annotations

from tests.cuda_emulator import asan

print("\n".join(f"{name}={value}" for name, value in asan.environment().items()))
