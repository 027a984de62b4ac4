"""Whole plans used again: an evaluation set's minibatches come back unchanged, epoch after epoch.

A graph that is recorded as an earlier one was needs no decoding, no levels, no strategy and no index tables: what the
earlier one's plan came to is copied. Only plans under `no_grad` are kept, since minibatches of training are shuffled
and hardly ever come again; and a plan is kept only when its graph comes the second time, so that what comes once costs
no memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dynbatch.batching.plan import Tables
from dynbatch.graph import Graph

LIMIT = 64 << 20
"""Bytes that kept plans may take together; those not used for longest go first."""

_SEEN = 4096  # fingerprints remembered of graphs that came once


_SAMPLE = 512  # bytes at the start, in the middle and at the end of a recording, of which a key is found


class Key:
    """What a graph must have in common with an earlier one: all of it is compared, and a sample of it is hashed.

    Arguments:
        graph, strategy, targets: what is to be computed, and how.
        place: what its values' locations depend on besides.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, graph: Graph, strategy: str, targets: Sequence[int], place: Any = None) -> None:
        recorded = (graph.stream, graph.floats, graph.lanes, graph.phase_marks, graph.skips)
        stream, *others = [bytes(memoryview(a)) for a in recorded]
        self.parts = (stream, *others, strategy, tuple(targets), tuple(map(id, graph.signatures)), graph.dtype, place)
        middle = len(stream) // 2
        sample = stream[:_SAMPLE], stream[middle : middle + _SAMPLE], stream[-_SAMPLE:]
        self._hash = hash((len(stream), *sample))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.parts == other.parts

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(part) for part in self.parts if isinstance(part, bytes))


class Reusable(NamedTuple):
    """What the plan of a whole graph came to.

    Attributes:
        signatures_alive: of the graph, so that one that is gone is not mistaken for one at its address.
        order, starts, signatures: the batches.
        tables: their index tables.
        row: of each node.
        location: of each value.
    """

    signatures_alive: tuple[weakref.ref[Any], ...]
    order: np.ndarray
    starts: np.ndarray
    signatures: np.ndarray
    tables: Tables
    row: np.ndarray
    location: np.ndarray

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(a.nbytes for a in (self.order, self.starts, self.row, self.location)) + self.tables.nbytes


class PlanCache:
    """Plans by what was recorded; bounded by bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.hits = self.misses = self.bytes = 0
        self._kept: OrderedDict[Key, Reusable] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Key) -> Reusable | None:
        """The plan of an equal graph, if one is kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None and all(ref() is not None for ref in found.signatures_alive):
                self._kept.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
            return None

    def wants(self, key: Key) -> bool:
        """Whether the plan of this graph is worth keeping: an equal one came before. Notes that it came."""
        fingerprint = hash(key.parts[:-1])  # the place settles while plans run
        with self._lock:
            if fingerprint in self._seen:
                return True
            self._seen[fingerprint] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return False

    def keep(self, key: Key, plan: Reusable) -> None:
        """Keep a plan, and let go of those that there is no room for."""
        cost = plan.size + key.size
        if cost > self.limit:
            return
        with self._lock:
            old = self._kept.pop(key, None)
            if old is not None:
                self.bytes -= old.size + key.size
            self._kept[key] = plan
            self.bytes += cost
            while self.bytes > self.limit:
                gone, dropped = self._kept.popitem(last=False)
                self.bytes -= dropped.size + gone.size

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()
            self.hits = self.misses = self.bytes = 0


plans = PlanCache()
"""Of the process."""
