"""A backward plan of its own: over the rows that the loss reaches, whatever plans computed them.

Gradients are pulled: each consumer leaves its gradient on its own edge, and a value sums its edges when its turn
comes. What sums over a whole batch (gradients of parameters) runs once at the end, over all rows of a signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynbatch.batching import backward as reverse
from dynbatch.batching import stream as passes
from dynbatch.batching.depth import depth
from dynbatch.batching.pending import Pending
from dynbatch.batching.plan import Tables
from dynbatch.compiler.ir import ROW
from dynbatch.config import config
from dynbatch.cpu.code import GradientCode
from dynbatch.cpu.job import Edges
from dynbatch.graph import state

if TYPE_CHECKING:
    from dynbatch.batching.execution import Execution


class Final(NamedTuple):
    """All rows of a signature in a backward plan.

    Attributes:
        signature: its number in the graph.
        tables, b: index tables, and which batch of them this is.
        nodes: the rows' nodes.
        follows: whether they follow each other in their pool.
    """

    signature: int
    tables: Tables
    b: int
    nodes: np.ndarray
    follows: bool


class BackwardRun:
    """One backward plan: over the rows that the loss reaches, whatever plans computed them."""

    order: np.ndarray
    starts: np.ndarray
    signatures: np.ndarray

    def __init__(self, execution: Execution, loss: int, full: bool) -> None:
        self.x = x = execution
        self.walk = (x.stream, x.layout, x.pos, x.producer)
        self.full = full
        trained = np.array([any(p.update for p in pools.signature.binding) for pools in x.pools], np.bool_)
        self.needs = np.zeros(loss + 1, np.bool_)
        wanted = np.zeros(x.widths.shape, np.bool_)
        count = reverse.reach(*self.walk, x.sig, trained, full, loss, self.needs, wanted)
        self.sizes = np.zeros(len(x.pools), np.int64)
        self._order(count)
        np.add.at(self.sizes, self.signatures, np.diff(self.starts))
        self.codes: dict[int, GradientCode] = {}
        for s in np.flatnonzero(self.sizes).tolist():
            pools = x.pools[s]
            args, lists = int(x.layout[s, passes.ARGS]), int(x.layout[s, passes.LISTS])
            flags = [bool(f) for f in wanted[s, : args + lists]]
            slots = tuple(bool(p.update) for p in pools.signature.binding)
            self.codes[s] = pools.code.gradient(tuple(flags[:args]), slots, tuple(flags[args:]), not pools.kept, full)

    def _order(self, count: int) -> None:
        """Batches in the order of the forward pass; they run from the last to the first.

        What one plan computed keeps its batches, whose rows then are contiguous. Several plans (values that were read
        midway) are merged by level, unless that makes more batches.
        """
        x = self.x
        order, starts, signatures = [np.concatenate(parts) for parts in zip(*_shifted(x.executed))]
        new_order = np.empty(count, np.int64)
        new_starts, new_signatures = np.empty(signatures.size + 1, np.int64), np.empty(signatures.size, np.int64)
        batches = reverse.keep_needed(order, starts, signatures, self.needs, new_order, new_starts, new_signatures)
        self.order, self.starts = new_order, new_starts[: batches + 1]
        self.signatures = new_signatures[:batches]
        if len(x.executed) > 1 and (state.strategy or config.autobatch) != "off":
            nodes = np.flatnonzero(self.needs)
            levels = passes.levels(*self.walk, self.needs, nodes, x.level)
            merged, merged_starts = depth(
                Pending(
                    nodes,
                    x.sig,
                    x.level,
                    levels,
                    len(x.pools),
                    x.lane_group,
                    x.stream,
                    x.layout,
                    x.pos,
                    x.producer,
                    x.place,
                )
            )
            if merged_starts.size - 1 < batches:
                self.order, self.starts = merged, merged_starts
                self.signatures = x.sig[merged[merged_starts[:-1]]]

    def prepare(self, loss: int) -> None:
        """Allocate gradients and build the index tables."""
        x, arena = self.x, self.x.arena
        lists = max(1, int(x.layout[:, passes.LISTS].max()))
        rows, elements = np.zeros(len(x.pools), np.int64), np.zeros((len(x.pools), lists), np.int64)
        self.place = np.empty(x.nodes, np.int64)
        batch_row, batch_element = (
            np.empty(self.signatures.size, np.int64),
            np.empty((self.signatures.size, lists), np.int64),
        )
        reverse.count_rows(
            x.stream, x.layout, x.pos, self.order, self.starts, self.signatures, rows, elements, self.place,
            batch_row, batch_element,
        )  # fmt: skip
        self.batch_row, self.batch_element = batch_row.tolist(), batch_element.tolist()
        self.rows, self.elements = rows.tolist(), elements.tolist()
        base, stride = np.full(x.widths.shape, -1, np.int64), np.zeros(x.widths.shape, np.int64)
        self.bases: dict[int, dict[int, int]] = {}
        for s, code in self.codes.items():
            bases = self.bases[s] = {}
            for v in code.stored:
                bases[v] = arena.allocate(self._count(s, code.program.values[v].domain) * code.width(v))
            for place, (v, column) in code.results.items():
                base[s, place] = bases[v] + column
                stride[s, place] = code.width(v)
        seed = arena.one()
        self.edge_location = np.full(x.words + 1, -1, np.int64)
        self.edge_location[x.words] = seed
        self.ptr = np.zeros(x.values + 1, np.int64)
        self.ptr[loss + 1] = 1
        reverse.place_edges(
            *self.walk, self.order, self.starts, self.signatures, _padded(self.needs, x.nodes), base, stride,
            self.edge_location, self.ptr,
        )  # fmt: skip
        np.cumsum(self.ptr, out=self.ptr)
        edges = np.empty(self.ptr[-1], np.int64)
        fill = self.ptr[:-1].copy()
        edges[fill[loss]] = x.words
        fill[loss] += 1
        reverse.list_edges(x.stream, x.layout, x.pos, self.order, self.edge_location, fill, edges)
        self.edges = Edges(self.ptr, edges, self.edge_location)
        self.tables = Tables(x, self.order, self.starts, self.signatures)
        self.runs = np.empty(self.signatures.size, np.bool_)
        reverse.rows_are_runs(self.order, self.starts, x.row, self.runs)

    def _count(self, s: int, domain: int) -> int:
        if domain == ROW:
            return self.rows[s]
        lists = [k for k, g in self.x.pools[s].signature.program.groups.items() if g == domain]
        return self.elements[s][lists[0]]

    def nodes(self, b: int) -> np.ndarray:
        """Those of batch ``b``."""
        return self.order[self.starts[b] : self.starts[b + 1]]

    def destination(self, b: int) -> dict[int, int]:
        """Where the stored values of batch ``b`` go."""
        s = self.tables.signature_list[b]
        code, found = self.codes[s], {}
        for v in code.stored:
            domain = code.program.values[v].domain
            at = self.batch_row[b] if domain == ROW else self._element_start(s, b, domain)
            found[v] = self.bases[s][v] + at * code.width(v)
        return found

    def _element_start(self, s: int, b: int, domain: int) -> int:
        lists = [k for k, g in self.x.pools[s].signature.program.groups.items() if g == domain]
        return self.batch_element[b][lists[0]]

    def finals(self) -> Iterator[Final]:
        """All rows of each signature whose parameters get a gradient, as one batch."""
        x = self.x
        trained = [s for s, code in self.codes.items() if code.slots]
        if not trained:
            return
        by_signature = np.argsort(np.repeat(self.signatures, np.diff(self.starts)), kind="stable")
        order = self.order[by_signature]
        bounds = np.concatenate(([0], np.cumsum(self.sizes)))
        chosen = np.array(trained)
        order = np.concatenate([order[bounds[s] : bounds[s + 1]] for s in trained])
        starts = np.concatenate(([0], np.cumsum(self.sizes[chosen])))
        tables = Tables(x, order, starts, chosen)
        for b, s in enumerate(trained):
            nodes = order[starts[b] : starts[b + 1]]
            yield Final(s, tables, b, nodes, bool((np.diff(x.row[nodes]) == 1).all()))

    def gradient(self, vid: int, type: Any) -> np.ndarray:
        """The gradient of a value after a full backward pass, in the user's shape; zeros where it is not reached."""
        x = self.x
        node = int(x.producer[vid])
        if node >= self.needs.size or not self.needs[node]:
            return np.zeros(type.shape, x.dtype)
        s = int(x.sig[node])
        v, column = self.codes[s].outputs[vid - int(x.first[node])]
        start = self.bases[s][v] + int(self.place[node]) * self.codes[s].width(v) + column
        return np.array(x.arena.read(np.array([start]), type.storage)[0].T, order="C")


def _padded(mask: np.ndarray, size: int) -> np.ndarray:
    result = np.zeros(size, np.bool_)
    result[: mask.size] = mask
    return result


def _shifted(executed: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, ...]]:
    """Plans with the batch starts of their concatenation."""
    parts: list[tuple[np.ndarray, ...]] = []
    offset = 0
    for i, (order, starts, signatures) in enumerate(executed):
        last = i == len(executed) - 1
        parts.append((order, (starts if last else starts[:-1]) + offset, signatures))
        offset += order.size
    return parts
