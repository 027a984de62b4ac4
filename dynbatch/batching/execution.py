"""The execution of one graph: its nodes in arrays, what has run and where, and the running of plans.

Work is always in proportion to what is pending: decoding, levels, sorting and tables touch only nodes that have not
run. A plan that fails leaves everything as it was before it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from dynbatch.batching import backward as reverse
from dynbatch.batching import stream as passes
from dynbatch.batching.agenda import agenda
from dynbatch.batching.depth import depth
from dynbatch.batching.off import off
from dynbatch.batching.pending import Pending
from dynbatch.batching.plan import BatchReport, Plan, Tables
from dynbatch.compiler.ir import ROW, SHARED
from dynbatch.config import config
from dynbatch.cpu.code import ForwardCode, GradientCode
from dynbatch.cpu.gather import gather_from, sum_edges
from dynbatch.cpu.memory import Arena
from dynbatch.cpu.routine import Frame, Routine
from dynbatch.cpu.tiers import is_hot
from dynbatch.errors import BackwardError, ValidityError
from dynbatch.graph import Graph, state
from dynbatch.signature import Signature

STRATEGIES = {"off": off, "depth": depth, "agenda": agenda}


class Segment:
    """Consecutive rows of one signature: where each stored value's row ``first_row`` lies."""

    __slots__ = ("bases", "end_row", "first_row", "kept")

    def __init__(self, first_row: int, end_row: int, bases: dict[int, int], kept: bool) -> None:
        self.first_row = first_row
        self.end_row = end_row
        self.bases = bases
        self.kept = kept


class Pools:
    """What a graph holds for one signature.

    Attributes:
        rows: how many have been computed.
        segments: where they lie, by first row; usually one.
        kept: whether all rows have the intermediates that the gradient reads.
        version: of the parameters that the rows were computed with; None before the first.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.code: ForwardCode = signature.program.cache.get("code") or signature.program.cache.setdefault(
            "code", ForwardCode(signature.program)
        )
        self.rows = 0
        self.segments: list[Segment] = []
        self.kept = True
        self.version: Any = None
        self.shapes = ", ".join(str(t.shape) for t in signature.types)

    def reserve(self, count: int, keep: bool, arena: Any) -> Segment:
        """Room for ``count`` more rows, all in one segment."""
        last = self.segments[-1] if self.segments else None
        if last is None or last.kept != keep or last.end_row < self.rows + count:
            # past the first plan, grow so that many small plans still make long runs of rows
            capacity = count if last is None else max(count, self.rows)
            code = self.code
            bases = {v: arena.allocate(capacity * code.width(v)) for v in code.stored[keep]}
            last = Segment(self.rows, self.rows + capacity, bases, keep)
            self.segments.append(last)
        return last

    def find(self, row: int, end: int) -> Segment | None:
        """The segment that holds rows ``row`` to ``end`` (exclusive), if a single one does."""
        for segment in reversed(self.segments):
            if segment.first_row <= row:
                return segment if end <= segment.end_row else None
        return None

    def locate(self, v: int, rows: np.ndarray) -> np.ndarray:
        """Location of stored value ``v`` of each row."""
        width = self.code.width(v)
        firsts = np.array([s.first_row for s in self.segments])
        bases = np.array([s.bases.get(v, -1) for s in self.segments])
        which = np.searchsorted(firsts, rows, side="right") - 1
        return bases[which] + (rows - firsts[which]) * width


class Execution:
    """Arrays over the nodes and values of a graph, and the plans that fill them.

    Attributes:
        stream, layout, pos, first, producer, fpos, payload: the decoded recording; see `dynbatch.batching.stream`.
        row: each node's row in its signature's pools, -1 until it has run.
        location: where each value lies in the arena.
        widths: size of each signature's arguments and list elements, by place.
        last, last_backward: reports of the last plans.
    """

    def __init__(self, graph: Graph) -> None:
        self.dtype = np.dtype(graph.dtype)
        self.arena = Arena(graph.dtype)
        self.stream = np.empty(0, np.int64)
        self.payload = np.empty(0, np.float64)
        self.data = np.empty(0, self.dtype)
        self.pos, self.first, self.fpos, self.sig = (np.empty(0, np.int64) for _ in range(4))
        self.row, self.level, self.place, self.lane_group = (np.empty(0, np.int64) for _ in range(4))
        self.producer, self.location = np.empty(0, np.int64), np.empty(0, np.int64)
        self.start(graph)

    def start(self, graph: Graph) -> None:
        """Begin with an empty graph; arrays and arena are used again, since fresh pages cost their faults."""
        self.graph = graph
        self.nodes = self.values = self.words = self.floats = self.data_size = 0
        self.lane_words = self.lanes = 0
        self.layout = np.empty((0, 5), np.int64)
        self.widths = np.empty((0, 1), np.int64)
        self.pools: list[Pools] = []
        self.pending = _NONE
        self.executed: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.last = Plan("forward", config.autobatch)
        self.last_backward = Plan("backward", config.autobatch)
        self._full: BackwardRun | None = None
        self._warned = False

    def release(self) -> None:
        """The graph is over: forget it, and be there for the next one."""
        self.arena.reset()
        self.start(None)  # type: ignore[arg-type]
        _idle.append(self)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Take over what was recorded since the last time."""
        graph = self.graph
        words, values = len(graph.stream), graph.values
        if words == self.words:
            return
        new_values = values - self.values
        self.stream = _extended(self.stream, self.words, graph.stream, words)
        self.payload = _extended(self.payload, self.floats, graph.floats, len(graph.floats))
        self.data = _extended(self.data, self.data_size, graph.data, len(graph.data))
        self.data_size = len(graph.data)
        for name in ("producer", "location"):
            setattr(self, name, _grown(getattr(self, name), self.values, values))
        self.location[self.values : values] = -1
        most = self.nodes + new_values  # every node has an output
        for name in ("pos", "first", "fpos", "sig", "row", "level", "place", "lane_group"):
            setattr(self, name, _grown(getattr(self, name), self.nodes, most))
        self._add_signatures()
        end = passes.decode(
            self.stream, self.words, words, self.layout, self.nodes, self.values, self.floats,
            self.pos, self.first, self.fpos, self.producer,
        )  # fmt: skip
        new = np.arange(self.nodes, end)
        self.row[new] = self.place[new] = self.lane_group[new] = -1
        passes.signatures_of(self.stream, self.pos, new, self.sig)
        lanes = graph.lanes
        for i in range(self.lane_words, len(lanes), 2):
            start = int(self.producer[lanes[i]])
            self.lane_group[start : start + lanes[i + 1]] = self.lanes
            self.lanes += 1
        self.lane_words = len(lanes)
        self.pending = np.concatenate((self.pending, new)) if self.pending.size else new
        self.words, self.values, self.nodes, self.floats = words, values, end, len(graph.floats)
        if self.values > GRAPH_WARNING and not self._warned:
            self._warned = True
            warnings.warn(
                f"this graph holds {self.values} values; call dy.renew_cg() between minibatches to free them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _add_signatures(self) -> None:
        graph = self.graph
        if len(self.pools) == len(graph.signatures):
            return
        for signature in graph.signatures[len(self.pools) :]:
            self.pools.append(Pools(signature))
        rows, places = [], []
        for pools in self.pools:
            program = pools.signature.program
            args, lists, ints, floats, _ = program.layout
            rows.append((args, lists, ints, floats, len(program.outputs)))
            sizes = [0] * (args + lists)
            for value in program.values:
                if value.kind in ("arg", "list"):
                    assert value.type is not None
                    sizes[value.index + (args if value.kind == "list" else 0)] = value.type.size
            places.append(sizes)
        self.layout = np.array(rows, np.int64)
        self.widths = np.zeros((len(places), max(1, *(len(p) for p in places))), np.int64)
        for s, sizes in enumerate(places):
            self.widths[s, : len(sizes)] = sizes

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, targets: list[int]) -> None:
        """Compute these values and what they need, and whatever else fills the same batches."""
        self._sync()
        if all(self.location[t] >= 0 for t in targets):
            return
        strategy = state.strategy or config.autobatch
        plan = Plan("forward", strategy)
        begin = plan.clock()
        nodes = self._choose(np.array(targets, np.int64), strategy)
        levels = int(self.level[nodes].max()) + 1
        pending = Pending(
            nodes, self.sig, self.level, levels, len(self.pools), self.lane_group,
            self.stream, self.layout, self.pos, self.producer, self.place,
        )  # fmt: skip
        order, starts = STRATEGIES[strategy](pending)
        signatures = self.sig[order[starts[:-1]]]
        before = (self.arena.top, [(p.rows, len(p.segments), p.kept, p.version) for p in self.pools])
        try:
            self._place(order, starts, signatures)
            tables = Tables(self, order, starts, signatures)
            plan.schedule_seconds = plan.clock() - begin
            self._run(plan, tables, order)
        except BaseException:
            self._undo(order, before)
            raise
        finally:
            self.arena.release_scratch()
        plan.run_seconds = plan.clock() - begin - plan.schedule_seconds
        self.executed.append((order, starts, signatures))
        self.pending = self.pending[self.row[self.pending] < 0] if nodes.size < self.pending.size else _NONE
        self.last = plan

    def _choose(self, targets: np.ndarray, strategy: str) -> np.ndarray:
        """The nodes to run now, ascending; their levels are set."""
        marked = np.zeros(self.nodes, np.bool_)
        walk = (self.stream, self.layout, self.pos, self.producer)
        needed = passes.mark_ancestors(*walk, self.row, targets, self.pending, marked)
        if strategy == "off" or needed == self.pending.size:
            nodes = self.pending[marked[self.pending]] if needed < self.pending.size else self.pending
            passes.levels(*walk, marked, nodes, self.level)
            return nodes
        member = self.row[: self.nodes] < 0
        levels = passes.levels(*walk, member, self.pending, self.level)
        key = self.level[self.pending] * len(self.pools) + self.sig[self.pending]
        group = np.full(self.nodes, -1, np.int64)
        group[self.pending] = key
        group_needed = np.zeros(levels * len(self.pools), np.bool_)
        group_needed[key[marked[self.pending]]] = True
        chosen = np.zeros(self.nodes, np.bool_)
        passes.joiners(*walk, self.pending, marked, group, group_needed, chosen)
        return self.pending[chosen[self.pending]]

    def _place(self, order: np.ndarray, starts: np.ndarray, signatures: np.ndarray) -> None:
        """Give every node a row and every value a location."""
        keep = state.keep
        sizes = np.zeros(len(self.pools), np.int64)
        np.add.at(sizes, signatures, np.diff(starts))
        outs = int(self.layout[:, passes.OUTS].max())
        base, stride = np.zeros((len(self.pools), outs), np.int64), np.zeros((len(self.pools), outs), np.int64)
        count = np.zeros(len(self.pools), np.int64)
        for s in np.flatnonzero(sizes).tolist():
            pools = self.pools[s]
            version = tuple(p.root.version for p in pools.signature.binding)
            if pools.version is not None and pools.version != version:
                pools.version = "mixed"
            elif pools.version is None:
                pools.version = version
            segment = pools.reserve(int(sizes[s]), keep, self.arena)
            pools.kept = pools.kept and keep
            count[s] = pools.rows
            for o, v in enumerate(pools.code.outputs):
                stride[s, o] = pools.code.width(v)
                base[s, o] = segment.bases[v] - segment.first_row * stride[s, o]
            pools.rows += int(sizes[s])
        passes.place_rows(
            order, starts, signatures, self.first, self.layout, count, base, stride, self.row, self.location
        )

    def _undo(self, order: np.ndarray, before: tuple[int, list[tuple[int, int, bool, Any]]]) -> None:
        self.row[order] = -1
        for n in order.tolist():
            first = self.first[n]
            self.location[first : first + self.layout[self.sig[n], passes.OUTS]] = -1
        self.arena.reset(before[0])
        for pools, (rows, segments, kept, version) in zip(self.pools, before[1]):
            pools.rows, pools.kept, pools.version = rows, kept, version
            del pools.segments[segments:]

    def _run(self, plan: Plan, tables: Tables, order: np.ndarray) -> None:
        keep = state.keep
        clock, arena = plan.clock, self.arena
        starts = tables.starts.tolist()
        first_rows = self.row[order[tables.starts[:-1]]].tolist()
        for b, s in enumerate(tables.signature_list):
            begin = clock()
            pools = self.pools[s]
            rows = starts[b + 1] - starts[b]
            # the NumPy tier sees every value, so that a check names the op
            routine = pools.code.routine(keep, not config.check_validity and is_hot(pools.code.digest, rows))
            frame = Frame(routine, arena, rows)
            segment = pools.find(first_rows[b], first_rows[b] + rows)
            assert segment is not None
            for v in routine.stored:
                frame.destination[v] = segment.bases[v] + (first_rows[b] - segment.first_row) * pools.code.width(v)
            self._load(frame, tables, b, pools.signature)
            for step in routine.steps:
                step(frame)
            if config.check_validity:
                self._check(frame, pools, b)
            plan.batch_reports.append(
                BatchReport(
                    routine.program.name,
                    rows,
                    clock() - begin,
                    frame.gathered * arena.itemsize,
                    routine.tier,
                    pools.shapes,
                )
            )
            arena.release_scratch()
        if config.debug:
            for report in plan.batch_reports:
                print(f"dynbatch: {report}", file=sys.stderr)

    def _load(self, frame: Frame, tables: Tables, b: int, signature: Signature) -> None:
        """Fill in the inputs of a batch."""
        routine = frame.routine
        for v, value in routine.inputs:
            kind, index = value.kind, value.index
            if kind == "arg":
                where, run = tables.arg(b, index)
                if run:
                    frame.location[v] = int(where[0])
                frame.index[v] = where
            elif kind == "list":
                ptr, where, run = tables.list(b, index)
                frame.elements[value.domain] = where.size
                if run and where.size:
                    frame.location[v] = int(where[0])
                frame.index[v] = where
            elif kind == "ptr":
                lists = [k for k, g in signature.program.groups.items() if g == index]
                frame.arrays[v], where, _ = tables.list(b, lists[0])
                frame.elements[index] = where.size
            elif kind == "int":
                frame.arrays[v] = tables.int(b, index)
            elif kind == "float":
                frame.arrays[v] = tables.float(b, index).astype(self.dtype)[:, None]
            elif kind == "data":
                assert value.type is not None
                start = self.arena.scratch(frame.rows * value.type.size)
                gather_from(self.data, tables.int(b, index), value.type.size, self.arena.mem, start)
                frame.location[v] = start
            elif kind == "slot":
                frame.arrays[v] = signature.binding[index].data[None]
            elif kind == "table":
                frame.arrays[v] = signature.binding[index].data
        for v, array in self._shared(routine, signature).items():
            frame.arrays[v] = array

    def _shared(self, routine: Routine, signature: Signature) -> dict[int, Any]:
        """What the routine needs that depends on parameters alone, computed once a parameter version."""
        if not routine.shared_values and not routine.forward_shared:
            return {}
        version = tuple(p.root.version for p in signature.binding)
        known = signature.cache.get(routine)
        if known is None or known[0] != version:
            frame = Frame(routine, self.arena, 1)
            for v, value in enumerate(routine.program.values):
                if value.kind == "slot":
                    frame.arrays[v] = signature.binding[value.index].data[None]
            forward = routine.forward_shared
            if forward:
                source = self._shared(forward[0], signature)
                for v, index in forward[1]:
                    frame.arrays[v] = source[index]
            for step in routine.shared:
                step(frame)
            found = {v: frame.arrays[v] for v in routine.shared_values}
            if forward:
                found.update((v, frame.arrays[v]) for v, _ in forward[1])
            known = signature.cache[routine] = (version, found)
        return known[1]

    def _check(self, frame: Frame, pools: Pools, b: int) -> None:
        program = frame.routine.program
        for v, value in enumerate(program.values):
            if v in frame.routine.stored or value.op is not None:
                found = frame.arrays[v]
                if found is not None and found.dtype.kind == "f" and not np.isfinite(found).all():
                    what = "NaN" if np.isnan(found).any() else "infinity"
                    inside = f" in {program.name}" if value.op and value.op.name != program.name else ""
                    name = value.op.name if value.op else program.name
                    raise ValidityError(
                        f"{what} computed by {name}{inside}, batch {b} of the plan ({frame.rows} rows, "
                        f"output shapes {pools.shapes})"
                    )

    def value(self, vid: int, type: Any) -> np.ndarray:
        """A copy of a computed value, in the user's shape."""
        return np.array(self.arena.view(int(self.location[vid]), type.storage).T, order="C")

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: int, full: bool) -> None:
        """Add the gradients of value ``loss``, which has been computed, to those of the parameters."""
        plan = Plan("backward", state.strategy or config.autobatch)
        begin = plan.clock()
        run = BackwardRun(self, int(self.producer[loss]), full)
        for s in np.flatnonzero(run.sizes).tolist():
            self._check_version(self.pools[s])
        top = self.arena.top
        done = False
        try:
            run.prepare(loss)
            plan.schedule_seconds = plan.clock() - begin
            found = run.run(plan)
            for parameter, gradient in found:
                if isinstance(gradient, tuple):
                    parameter.add_gradient(*gradient)
                else:
                    parameter.grad[...] += gradient
            done = True
        finally:
            self.arena.release_scratch()
            if full and done:
                self._full = run
            else:
                self.arena.reset(top)
                self._full = None
        plan.run_seconds = plan.clock() - begin - plan.schedule_seconds
        self.last_backward = plan

    def gradient(self, vid: int, type: Any) -> np.ndarray:
        """Gradient of the last loss with respect to a value, after a full backward pass."""
        if self._full is None:
            raise BackwardError("gradient(): call backward(full=True) on the loss first")
        return self._full.gradient(vid, type)

    def _check_version(self, pools: Pools) -> None:
        binding = pools.signature.binding
        if pools.version != tuple(p.root.version for p in binding):
            names = ", ".join(p.name for p in binding)
            raise BackwardError(
                f"backward: parameters of {pools.signature.program.name} ({names}) changed since its values were "
                f"computed (by update() or set_value()); renew the graph and run the forward pass again"
            )


class BackwardRun:
    """One backward plan: over the rows that the loss reaches, whatever plans computed them."""

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
            self.codes[s] = pools.code.gradient(tuple(flags[:args]), slots, tuple(flags[args:]), not pools.kept)

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
                )  # fmt: skip
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
        seed = arena.allocate(1)
        arena.mem[seed] = 1
        self.edge_location = np.full(x.words + 1, -1, np.int64)
        self.edge_location[x.words] = seed
        self.ptr = np.zeros(x.values + 1, np.int64)
        self.ptr[loss + 1] = 1
        reverse.place_edges(
            *self.walk, self.order, self.starts, self.signatures, _padded(self.needs, x.nodes), base, stride,
            self.edge_location, self.ptr,
        )  # fmt: skip
        np.cumsum(self.ptr, out=self.ptr)
        self.edges = np.empty(self.ptr[-1], np.int64)
        fill = self.ptr[:-1].copy()
        self.edges[fill[loss]] = x.words
        fill[loss] += 1
        reverse.list_edges(x.stream, x.layout, x.pos, self.order, self.edge_location, fill, self.edges)
        self.tables = Tables(x, self.order, self.starts, self.signatures)
        self.runs = np.empty(self.signatures.size, np.bool_)
        reverse.rows_are_runs(self.order, self.starts, x.row, self.runs)

    def _count(self, s: int, domain: int) -> int:
        if domain == ROW:
            return self.rows[s]
        lists = [k for k, g in self.x.pools[s].signature.program.groups.items() if g == domain]
        return self.elements[s][lists[0]]

    def run(self, plan: Plan) -> list[tuple[Any, Any]]:
        """Run the batches, then what sums over all of them; returns (parameter, gradient) pairs."""
        x, arena, clock = self.x, self.x.arena, plan.clock
        starts = self.starts.tolist()
        for b in range(self.signatures.size - 1, -1, -1):
            begin = clock()
            s = self.tables.signature_list[b]
            pools, code = x.pools[s], self.codes[s]
            nodes = self.order[starts[b] : starts[b + 1]]
            routine = code.routine(is_hot(code.digest, nodes.size))
            frame = Frame(routine, arena, nodes.size)
            for v in code.stored:
                domain = code.program.values[v].domain
                at = self.batch_row[b] if domain == ROW else self._element_start(s, b, domain)
                frame.destination[v] = self.bases[s][v] + at * code.width(v)
            x._load(frame, self.tables, b, pools.signature)
            self._load_kept(frame, pools, nodes, bool(self.runs[b]))
            for v, output in code.douts:
                self._pull(frame, code, v, x.first[nodes] + output)
            for step in routine.steps:
                step(frame)
            plan.batch_reports.append(
                BatchReport(
                    code.program.name,
                    nodes.size,
                    clock() - begin,
                    frame.gathered * arena.itemsize,
                    routine.tier,
                    pools.shapes,
                )  # fmt: skip
            )
            arena.release_scratch()
        return self._finish()

    def _element_start(self, s: int, b: int, domain: int) -> int:
        lists = [k for k, g in self.x.pools[s].signature.program.groups.items() if g == domain]
        return self.batch_element[b][lists[0]]

    def _pull(self, frame: Frame, code: GradientCode, v: int, values: np.ndarray) -> None:
        """The gradient of an output: the sum of what its consumers left on their edges."""
        arena, width = self.x.arena, code.width(v)
        start = frame.destination.get(v, -1)
        pulled = (arena.mem, values, self.ptr, self.edges, self.edge_location, width)
        if start < 0:
            start = sum_edges(*pulled, -1)
            if start < 0:
                start = sum_edges(*pulled, arena.scratch(values.size * width))
        else:
            sum_edges(*pulled, start)
        frame.location[v] = start

    def _load_kept(self, frame: Frame, pools: Pools, nodes: np.ndarray, run: bool) -> None:
        """What the forward pass kept: a view where the rows follow each other, else gathered when asked for."""
        rows = self.x.row[nodes]
        for v, value in frame.routine.kept_inputs:
            segment = pools.find(int(rows[0]), int(rows[-1]) + 1) if run else None
            if segment is not None:
                frame.location[v] = segment.bases[value.index] + (int(rows[0]) - segment.first_row) * pools.code.width(
                    value.index
                )
            else:
                frame.index[v] = pools.locate(value.index, rows)

    def _finish(self) -> list[tuple[Any, Any]]:
        """Gradients of parameters: one product or sum over all rows of a signature."""
        x, arena = self.x, self.x.arena
        trained = [s for s, code in self.codes.items() if code.slots]
        if not trained:
            return []
        by_signature = np.argsort(np.repeat(self.signatures, np.diff(self.starts)), kind="stable")
        order = self.order[by_signature]
        bounds = np.concatenate(([0], np.cumsum(self.sizes)))
        chosen = np.array(trained)
        order = np.concatenate([order[bounds[s] : bounds[s + 1]] for s in trained])
        starts = np.concatenate(([0], np.cumsum(self.sizes[chosen])))
        tables = Tables(x, order, starts, chosen)
        found: list[tuple[Any, Any]] = []
        for b, s in enumerate(trained):
            pools, code = x.pools[s], self.codes[s]
            routine = code.routine(is_hot(code.digest, 0))
            frame = Frame(routine, arena, self.rows[s])
            x._load(frame, tables, b, pools.signature)
            nodes = order[starts[b] : starts[b + 1]]
            rows = x.row[nodes]
            self._load_kept(frame, pools, nodes, bool((np.diff(rows) == 1).all()))
            for v in code.stored:
                frame.location[v] = self.bases[s][v]
                frame.arrays[v] = None
            for step in routine.final:
                step(frame)
            for kind, slot, v in code.slots:
                parameter = pools.signature.binding[slot]
                array = frame.array(v)
                found.append((parameter, array if kind == "table" else array[0]))
        return found

    def gradient(self, vid: int, type: Any) -> np.ndarray:
        """The sum over a value's edges, in the user's shape; zeros where the loss does not reach it."""
        total = np.zeros(type.storage, self.x.dtype)
        if vid < self.ptr.size - 1:
            for e in self.edges[self.ptr[vid] : self.ptr[vid + 1]].tolist():
                total += self.x.arena.view(int(self.edge_location[e]), type.storage)
        return np.array(total.T, order="C")


GRAPH_WARNING = 5_000_000
"""Values in one graph beyond which a warning says that it was never renewed."""

_NONE = np.empty(0, np.int64)
_idle: list[Execution] = []


def take_execution(graph: Graph) -> Execution:
    """An execution for a graph: one that an earlier graph has left, or a new one."""
    for i, execution in enumerate(_idle):
        if execution.dtype.name == graph.dtype:
            _idle.pop(i).start(graph)
            return execution
    return Execution(graph)


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """The array with room for ``needed`` entries, the first ``used`` kept."""
    if array.size >= needed:
        return array
    result = np.empty(max(needed, 2 * array.size, 64), array.dtype)
    result[:used] = array[:used]
    return result


def _extended(copy: np.ndarray, used: int, source: Any, size: int) -> np.ndarray:
    """Copy what was appended to a recorded array; a view of it would forbid appending more."""
    if size == used:
        return copy
    copy = _grown(copy, used, size)
    copy[used:size] = np.frombuffer(source, copy.dtype, size - used, used * copy.itemsize)
    return copy


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


__all__ = ["SHARED", "Execution"]
