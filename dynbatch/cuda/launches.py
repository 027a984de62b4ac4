"""How many blocks and threads a kernel is launched with, by what a thread or a team of threads of it is for.

For nothing at all it is one block, which finds that there is nothing to do.
"""

from __future__ import annotations

from typing import NamedTuple

_BLOCK, LARGEST_TEAM = 128, 256  # threads
_MOST_BLOCKS_DOWN = 65535
_MOST_BLOCKS_ALONG = 1024  # of one part; they go over it in turns
SLICE = 256
"""Rows that one block of ``sum_slices`` adds up; as in ``kernels/sums.cu``."""


class Launch(NamedTuple):
    """Blocks of the grid, and threads of a block, by x, y and z."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def vector(dtype: str) -> int:
    """Elements of a 16-byte access."""
    return 4 if dtype == "float32" else 2


def teams(count: int, width: int, vector: int = 1) -> Launch:
    """A team for each row, or whatever else of this width, of whose elements a thread takes ``vector`` at a time.

    A team is a power of two of threads along x, at most what the width has use for: parts of a warp side by side in a
    block, or a block of its own, which waits for itself alone. Its size does not depend on how many rows there are.
    """
    steps = -(-width // vector)
    team = min(1 << (steps - 1).bit_length(), LARGEST_TEAM)
    together = max(1, _BLOCK // team) if team <= 32 else 1
    return Launch((_blocks(count, together), 1, 1), (team, together, 1))


def elements(count: int) -> Launch:
    """A thread for each."""
    return Launch((_blocks(count, _BLOCK), 1, 1), (_BLOCK, 1, 1))


def slices(rows: int, width: int) -> Launch:
    """For ``sum_slices``; the number of slices is the grid's y."""
    return Launch((_blocks(width, 32), _blocks(rows, SLICE), 1), (32, 8, 1))


def parts(count: int, longest: int) -> Launch:
    """For the trainers' rules, ``squared_norm`` and ``add_parts``: a row of blocks for each part."""
    along = min(_blocks(longest, 256), _MOST_BLOCKS_ALONG)
    return Launch((along, max(1, min(count, _MOST_BLOCKS_DOWN)), 1), (256, 1, 1))


def gather_product(rows: int, width: int) -> tuple[str, Launch]:
    """Which ``gather_product`` computes a result of this size, and its launch; all of them give the same bits."""
    tall = 64 if rows > 128 else 16 if rows > 8 else 4
    return f"gather_product_{tall}", Launch((_blocks(rows, tall), _blocks(width, 64), 1), (256, 1, 1))


def _blocks(count: int, each: int) -> int:
    return max(1, -(-count // each))
