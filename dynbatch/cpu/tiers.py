"""Which tier runs a Program: NumPy at first, compiled kernels once it has run often enough to pay for compiling.

The rule counts work, not time, so that a run can be repeated bit for bit; checkpoints save the counts.
"""

from __future__ import annotations

import hashlib
import os

HOT_AFTER = 64
"""Work that a Program does in the NumPy tier before it is compiled: one for a batch, and one for every 32 rows."""

_MODES = ("hot", "background", "always", "never")
mode = os.environ.get("DYNBATCH_COMPILE", "hot")
"""``hot``: compile what runs often, and wait for it; ``background``: the same, but the NumPy tier runs meanwhile; when
that ends depends on time, and with it how results are rounded; ``always``: compile at once; ``never``."""

counts: dict[str, int] = {}
"""Work that each Program (by digest) has done; from `HOT_AFTER` on it is compiled, and counted no more."""


def set_mode(new: str) -> None:
    """Choose the mode, for tests and measurements."""
    global mode
    if new not in _MODES:
        raise ValueError(f"unknown compile mode {new!r}: choose one of {', '.join(_MODES)}")
    mode = new


def digest(text: str) -> str:
    """A Program's name in `counts`, from its printed form: the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def is_hot(name: str, rows: int) -> bool:
    """Count one more batch of a Program; whether it is to run compiled."""
    if mode in ("always", "never"):
        return mode == "always"
    count = counts.get(name, 0)
    if count >= HOT_AFTER:
        return True
    counts[name] = count + 1 + rows // 32
    return False
