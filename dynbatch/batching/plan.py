"""A plan: which nodes run together, in which order, with the operands of each batch as flat index tables."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

import numpy as np

from dynbatch.batching.stream import ARGS, INTS, make_tables
from dynbatch.config import config


class Tables:
    """Operand locations and payload of every batch of an order; see `make_tables`.

    Attributes:
        forms: what routines have made of parameters for the plan that is running, by routine and signature.
    """

    def __init__(self, graph: Any, order: np.ndarray, starts: np.ndarray, signatures: np.ndarray) -> None:
        self.starts = starts
        self.forms: dict[Any, Any] = {}
        self.signatures = signatures
        self.table, self.meta, self.floats, offsets, metas, floats = make_tables(
            graph.stream, graph.layout, graph.pos, graph.fpos, order, starts, signatures, graph.location, graph.widths,
            graph.payload,
        )  # fmt: skip
        self._floats_as: dict[np.dtype, np.ndarray] = {}
        self._offset_list, self._meta_list = offsets.tolist(), metas.tolist()
        self._float_list, self._start_list = floats.tolist(), starts.tolist()
        self._flags = self.meta.tolist()
        self._layout_list: list[list[int]] = graph.layout.tolist()
        self.signature_list: list[int] = signatures.tolist()

    @property
    def nbytes(self) -> int:
        """Memory that the tables take, about."""
        lists = (self._offset_list, self._meta_list, self._float_list, self._start_list, self._flags)
        return self.table.nbytes + self.meta.nbytes + self.floats.nbytes + 8 * sum(len(x) for x in lists)

    def header(self, b: int) -> tuple[int, int, int, int, int, int]:
        """Where batch ``b``'s arguments, integers, lists, floats, and the flags of arguments and lists start."""
        layout = self._layout_list[self.signature_list[b]]
        rows, start, flags = self.rows(b), self._offset_list[b], self._meta_list[b]
        ints = start + layout[ARGS] * rows
        return start, ints, ints + layout[INTS] * rows, self._float_list[b], flags, flags + layout[ARGS]

    def elements(self, b: int, index: int) -> int:
        """Number of elements of a list argument over all rows."""
        return self._flags[self._meta_list[b] + self._layout_list[self.signature_list[b]][ARGS] + 2 * index]

    def rows(self, b: int) -> int:
        """Number of nodes in batch ``b``."""
        return self._start_list[b + 1] - self._start_list[b]

    def arg_column(self, b: int, index: int) -> tuple[np.ndarray, bool]:
        """Location of each row's argument, and whether they follow each other."""
        rows = self.rows(b)
        start = self._offset_list[b] + index * rows
        return self.table[start : start + rows], self._flags[self._meta_list[b] + index] == 1

    def is_one(self, b: int, index: int) -> bool:
        """Whether an argument is the same value in every row of the batch."""
        return self._flags[self._meta_list[b] + index] == 2

    def int_column(self, b: int, index: int) -> np.ndarray:
        """An integer payload column."""
        rows = self.rows(b)
        start = self._offset_list[b] + (self._layout_list[self.signature_list[b]][ARGS] + index) * rows
        return self.table[start : start + rows]

    def float_column(self, b: int, index: int) -> np.ndarray:
        """A float payload column, in float64."""
        rows = self.rows(b)
        start = self._float_list[b] + index * rows
        return self.floats[start : start + rows]

    def floats_as(self, dtype: np.dtype) -> np.ndarray:
        """The float payload of all batches, in the precision of the graph."""
        found = self._floats_as.get(dtype)
        if found is None:
            found = self._floats_as[dtype] = self.floats.astype(dtype, copy=False)
        return found

    def list_segments(self, b: int, index: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Boundaries and element locations of a list argument, and whether the elements follow each other."""
        rows = self.rows(b)
        layout = self._layout_list[self.signature_list[b]]
        start = self._offset_list[b] + (layout[ARGS] + layout[INTS]) * rows
        flag = self._meta_list[b] + layout[ARGS]
        for k in range(index):
            start += rows + 1 + self._flags[flag + 2 * k]
        count, run = self._flags[flag + 2 * index : flag + 2 * index + 2]
        boundaries = self.table[start : start + rows + 1]
        return boundaries, self.table[start + rows + 1 : start + rows + 1 + count], bool(run)


class BatchReport:
    """What one batch did.

    Attributes:
        name: of the op or cell.
        rows: nodes in the batch.
        seconds: time it ran.
        gathered: bytes copied to bring its operands together.
        viewed: bytes of operands that lay together already and were passed as views.
        tier: ``numpy``, ``compiled`` or ``cuda``.
        shapes: of the outputs.
    """

    __slots__ = ("gathered", "name", "rows", "seconds", "shapes", "tier", "viewed")

    def __init__(
        self, name: str, rows: int, seconds: float, gathered: int, viewed: int, tier: str, shapes: str
    ) -> None:
        self.name = name
        self.rows = rows
        self.seconds = seconds
        self.gathered = gathered
        self.viewed = viewed
        self.tier = tier
        self.shapes = shapes

    def __repr__(self) -> str:
        return (
            f"{self.name:<28.28} {self.rows:>7} rows  {self.shapes:<20} {self.gathered / 1024:>9.1f} KiB gathered "
            f"{self.seconds * 1e6:>9.0f} us  {self.tier}"
        )


class Plan:
    """The last plan that ran; print it for a table.

    Attributes:
        direction: ``forward`` or ``backward``.
        strategy: that made it.
        nodes: how many ran.
        rows_per_batch: list of batch sizes, in order.
        batch_reports: a `BatchReport` for each batch.
        reused: whether order and tables are those of an equal graph that ran before.
        ran: the routines that ran, each with a weak reference to the signature that it ran for.
        schedule_seconds: time spent putting nodes in order and building index tables.
        run_seconds: time spent in the batches.
    """

    def __init__(self, direction: str, strategy: str) -> None:
        self.direction = direction
        self.strategy = strategy
        self.batch_reports: list[BatchReport] = []
        self.reused = False
        self.ran: dict[tuple[Any, weakref.ref[Any]], None] = {}
        self.schedule_seconds = 0.0
        self.run_seconds = 0.0
        self.clock = time.perf_counter

    @property
    def nodes(self) -> int:
        """Nodes that ran."""
        return sum(self.rows_per_batch)

    @property
    def batches(self) -> int:
        """Batches that ran."""
        return len(self.batch_reports)

    @property
    def rows_per_batch(self) -> list[int]:
        """Rows of each batch, in order."""
        return [b.rows for b in self.batch_reports]

    @property
    def bytes_gathered(self) -> int:
        """Bytes copied to bring operands together."""
        return sum(b.gathered for b in self.batch_reports)

    @property
    def bytes_viewed(self) -> int:
        """Bytes of operands that lay together already and were not copied."""
        return sum(b.viewed for b in self.batch_reports)

    @property
    def gathering_avoided(self) -> float:
        """The share of operand bytes that needed no copy, 0 to 1."""
        total = self.bytes_gathered + self.bytes_viewed
        return self.bytes_viewed / total if total else 0.0

    @property
    def seconds_per_batch(self) -> list[float]:
        """Run time of each batch, in order."""
        return [b.seconds for b in self.batch_reports]

    @property
    def products(self) -> dict[str, str]:
        """For each shape of weight that compiled batches multiplied with, who did it: ``own``, ``numpy`` or ``mkl``, by
        number of rows where that matters."""
        found: dict[str, str] = {}
        for routine, reference in self.ran:
            signature = reference()
            if signature is not None:
                found.update((f.name, f.kinds_text()) for f in routine.factors(signature))
        return found

    def add(self, routine: Any, job: Any, seconds: float, shapes: str) -> None:
        """Report a batch that has run, of a backend's routine and job."""
        item = job.arena.itemsize
        name, tier = routine.program.name, job.tier
        report = BatchReport(name, job.rows, seconds, job.gathered * item, job.viewed * item, tier, shapes)
        self.batch_reports.append(report)
        self.ran[routine, weakref.ref(job.signature)] = None

    def show_in_debug(self) -> None:
        """Print a line for each batch, in debug mode."""
        if config.debug:
            for report in self.batch_reports:
                print(f"dynbatch: {self.direction} {report}", file=sys.stderr)

    def __repr__(self) -> str:
        made = "reused" if self.reused else "scheduled"
        lines = [
            f"{self.direction} plan by {self.strategy}: {self.nodes} nodes in {self.batches} batches, "
            f"{self.bytes_gathered / 1024:.0f} KiB gathered ({self.gathering_avoided:.0%} avoided), "
            f"{made} in {self.schedule_seconds * 1e3:.2f} ms, run in {self.run_seconds * 1e3:.2f} ms"
        ]
        groups: dict[tuple[str, str, str], list[BatchReport]] = {}
        for report in self.batch_reports:
            groups.setdefault((report.name, report.shapes, report.tier), []).append(report)
        header = (
            f"{'program':<28} {'outputs':<20} {'batches':>7} {'rows':>8} {'rows/batch':>10} {'KiB':>9} {'ms':>8}  tier"
        )
        lines.append(header)
        for (name, shapes, tier), found in sorted(groups.items(), key=lambda g: -sum(r.seconds for r in g[1])):
            rows = sum(r.rows for r in found)
            lines.append(
                f"{name:<28.28} {shapes:<20.20} {len(found):>7} {rows:>8} {rows / len(found):>10.1f} "
                f"{sum(r.gathered for r in found) / 1024:>9.0f} {sum(r.seconds for r in found) * 1e3:>8.2f}  {tier}"
            )
        if self.products:
            lines.append("products: " + "; ".join(f"{name} {who}" for name, who in self.products.items()))
        return "\n".join(lines)
