"""Which tier runs a Program: NumPy at first, compiled kernels once it has run often enough to pay for compiling.

The rule counts batches, not time, so that a run can be repeated bit for bit; checkpoints save the counts.
"""

from __future__ import annotations

import hashlib
import os

HOT_AFTER = 40
"""Batches that a Program runs in the NumPy tier before it is compiled."""

_MODES = ("hot", "always", "never")
mode = os.environ.get("DYNBATCH_COMPILE", "hot")
"""``hot``: compile what runs often; ``always``: at once; ``never``."""

counts: dict[str, int] = {}
"""Batches that each Program (by digest) has run; at `HOT_AFTER` it is compiled, and counted no more."""


def set_mode(new: str) -> None:
    """Choose the mode, for tests and measurements."""
    global mode
    if new not in _MODES:
        raise ValueError(f"unknown compile mode {new!r}: choose one of {', '.join(_MODES)}")
    mode = new


def digest(text: str) -> str:
    """A Program's name in `counts`, from its printed form: the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def is_hot(name: str) -> bool:
    """Count one more batch of a Program; whether it is to run compiled."""
    if mode != "hot":
        return mode == "always"
    count = counts.get(name, 0)
    if count >= HOT_AFTER:
        return True
    counts[name] = count + 1
    return False
