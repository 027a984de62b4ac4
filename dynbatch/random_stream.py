"""Streams of random keys: what is drawn in one does not depend on what is recorded beside it, or in which order."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

from dynbatch.config import config, key_at, mix64
from dynbatch.errors import CellError, StaticError, user_line
from dynbatch.graph import state

_MASK = (1 << 64) - 1
_WITHIN = 0xA0761D6478BD642F  # any odd constant: keys of a stream, and streams within it, are different sequences


class RandomStream:
    """Random keys in a row, and the streams within this one by number, each of which goes on where it was left.

    Arguments:
        base: where it begins; None where that follows, when it is needed, from its number in an ``outer`` stream.
    """

    __slots__ = ("_base", "_number", "_outer", "_within", "draws")

    def __init__(self, base: int | None, outer: RandomStream | None = None, number: int = 0) -> None:
        self._base = base
        self._outer = outer
        self._number = number
        self.draws = 0
        self._within: dict[int, RandomStream] = {}

    @property
    def base(self) -> int:
        """Where it begins, in 64 bits. Most instances of a map draw nothing, and never ask."""
        if self._base is None:
            assert self._outer is not None
            self._base = key_at(mix64(self._outer.base ^ _WITHIN), self._number) & _MASK
        return self._base

    def next_key(self) -> int:
        """A fresh random key, as a signed 64-bit integer."""
        self.draws += 1
        return key_at(self.base, self.draws)

    def within(self, number: int) -> RandomStream:
        """The stream of this number within this one."""
        found = self._within.get(number)
        if found is None:
            found = self._within[number] = RandomStream(None, self, number)
        return found


def enclosing_stream() -> RandomStream:
    """The stream that streams opened here lie in: the one that is open, else the graph's."""
    if state.stream is not None:
        found: RandomStream = state.stream
        return found
    graph = state.graph
    if graph.random is None:
        graph.random = RandomStream(config.next_key() & _MASK)
    root: RandomStream = graph.random
    return root


@contextmanager
def stream(number: int) -> Iterator[None]:
    """Draw the random numbers of what is recorded within the block from a stream of their own.

    `map` opens stream ``i`` around instance ``i``, so that what an instance draws does not depend on when the others
    draw. A plain loop that does so too draws the same numbers:

    ```python
    for i, sentence in enumerate(minibatch):
        with dy.stream(i):
            losses.append(loss(sentence))  # with dropout, say
    ```

    Within a graph, a stream that is opened again goes on where it was left; another graph has other streams. Streams
    opened within a stream belong to it.

    Arguments:
        number: any integer.

    Raises:
        CellError: within a cell, whose calls draw where they are made; open it around the call.
        StaticError: within a static function, likewise.
    """
    number = operator.index(number)
    if state.tracer is not None:
        raise CellError(
            f"{user_line()}: cell {state.tracer.name} opens a random stream; open it around the cell's calls, which "
            f"is where they draw"
        )
    if state.graph.tape:
        raise StaticError(
            f"{user_line()}: {state.graph.tape} opens a random stream; open it around its calls, which is where they "
            f"draw"
        )
    before = state.stream
    state.stream = enclosing_stream().within(number)
    try:
        yield
    finally:
        state.stream = before
