"""Memory for a fixed number of 64-bit integers. `words.pyx` is the compiled module of this name."""

from __future__ import annotations

from array import array


class Words:
    """Integers, all zero at first.

    Attributes:
        memory: the array that holds them.
        at: what is indexed to read and write them; in compiled code a pointer.
    """

    def __init__(self, room: int) -> None:
        self.memory = array("q", bytes(8 * room))
        self.at = self.memory

    def put_moved(self, start: int, source: Words, moves: Words, count: int, base: int) -> None:
        """Write the first ``count`` integers of ``source`` from ``start`` on, plus ``base`` where ``moves`` is one."""
        import numpy as np

        mine, theirs, marks = (np.frombuffer(words.memory, np.int64) for words in (self, source, moves))
        mine[start : start + count] = theirs[:count] + base * marks[:count]
