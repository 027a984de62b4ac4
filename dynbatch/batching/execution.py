"""The execution of one graph: its nodes in arrays, what has run and where, and the running of plans.

Work is always in proportion to what is pending: decoding, levels, sorting and tables touch only nodes that have not
run. A plan that fails leaves everything as it was before it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.batching import stream as passes
from dynbatch.batching.agenda import agenda
from dynbatch.batching.backends import backend
from dynbatch.batching.backward_run import BackwardRun
from dynbatch.batching.depth import depth
from dynbatch.batching.layout import arrange
from dynbatch.batching.off import off
from dynbatch.batching.pending import Pending
from dynbatch.batching.plan import Plan, Tables
from dynbatch.batching.reuse import Key, Reusable, plans
from dynbatch.config import config
from dynbatch.cpu.pools import Pools
from dynbatch.errors import BackwardError, DeviceError, DynbatchError
from dynbatch.graph import Graph, state

if TYPE_CHECKING:
    from dynbatch.types import Type

STRATEGIES = {"off": off, "depth": depth, "agenda": agenda}


class Execution:
    """Arrays over the nodes and values of a graph, and the plans that fill them.

    Attributes:
        stream, layout, pos, first, producer, fpos, payload: the decoded recording; see `dynbatch.batching.stream`.
        row: each node's row in its signature's pools, -1 until it has run.
        waiting: whether each node has not run; ``pending`` lists those.
        marked, chosen, found, place: work space of the passes, as new between plans, so that a plan costs what is
            pending.
        location: where each value lies in the arena.
        widths: size of each signature's arguments and list elements, by place.
        last, last_backward: reports of the last plans.
    """

    def __init__(self, graph: Graph) -> None:
        self.dtype = np.dtype(graph.dtype)
        self.backend = backend()
        self.arena = self.backend.arena(graph.dtype)
        self.stream = np.empty(0, np.int64)
        self.payload = np.empty(0, np.float64)
        self.data = np.empty(0, self.dtype)
        self.pos, self.first, self.fpos, self.sig = (np.empty(0, np.int64) for _ in range(4))
        self.row, self.level, self.place, self.lane_group = (np.empty(0, np.int64) for _ in range(4))
        self.phase, self.skipped, self.found = (np.empty(0, np.int64) for _ in range(3))
        self.producer, self.location = np.empty(0, np.int64), np.empty(0, np.int64)
        self.waiting, self.marked, self.chosen = (np.empty(0, np.bool_) for _ in range(3))
        self._dirty = 0
        self.start(graph)

    def start(self, graph: Graph) -> None:
        """Begin with an empty graph; arrays and arena are used again, since fresh pages cost their faults."""
        for name, default in _DEFAULTS.items():
            getattr(self, name)[: self._dirty] = default
        self._dirty = 0  # nodes or values up to here may differ from the defaults
        self.graph = graph
        self.nodes = self.values = self.words = self.floats = self.data_size = 0
        self.lane_words = self.lanes = self.skip_words = self.phase_words = self.phase_now = 0
        self.layout = np.empty((0, 5), np.int64)
        self._outputs = 0  # the most that a signature has
        self.widths = np.empty((0, 1), np.int64)
        self.pools: list[Pools] = []
        self._pending, self._listed = _NONE, 0
        self.executed: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.last = Plan("forward", config.autobatch)
        self.last_backward = Plan("backward", config.autobatch)
        self._full: BackwardRun | None = None
        self._joined = False
        self._warned = False
        self.fetched: dict[int, np.ndarray] = {}  # values that were copied before they are read
        self._replayed: Reusable | None = None  # a plan that was used again; its graph is decoded when that is needed

    def release(self) -> None:
        """The graph is over: forget it, and be there for the next one."""
        self.arena.reset()
        self.start(None)  # type: ignore[arg-type]
        _idle.append(self)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Take over what was recorded since the last time."""
        graph = self.graph
        words, values = graph.size, graph.values
        if words == self.words:
            return
        self._make_room(values)
        self.stream = _extended(self.stream, self.words, graph.stream, words)
        self.payload = _extended(self.payload, self.floats, graph.floats, len(graph.floats))
        self.data = _extended(self.data, self.data_size, graph.data, len(graph.data))
        self.data_size = len(graph.data)
        self._add_signatures()
        begin = self.nodes
        end = passes.decode(
            self.stream, self.words, words, self.layout, begin, self.values, self.floats,
            self.pos, self.first, self.fpos, self.sig, self.producer,
        )  # fmt: skip
        lanes = graph.lanes
        for i in range(self.lane_words, len(lanes), 2):
            start = int(self.producer[lanes[i]])
            self.lane_group[start : start + lanes[i + 1]] = self.lanes
            self.lanes += 1
        self.lane_words = len(lanes)
        taken = self._take_phases(begin, end) if graph.phase_marks or graph.skips else (0, 0)
        self.words, self.values, self.nodes, self.floats = words, values, end, len(graph.floats)
        self.phase_words, self.phase_now = taken  # with the words, so that both or neither are taken over
        if self._replayed is not None:
            self._take_over(self._replayed)
            self._replayed = None
        if self.values > GRAPH_WARNING and not self._warned:
            self._warned = True
            warnings.warn(
                f"this graph holds {self.values} values; call dy.renew_cg() between minibatches to free them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_room(self, values: int) -> None:
        """Arrays for as many values, and for their nodes, of which there are no more: every node has an output."""
        self._dirty = max(self._dirty, values)
        used = self.location.size
        if values <= used:
            return
        for name in (*_PLAIN, *_DEFAULTS):  # `location` last: after an interrupt it says that not all have grown
            grown = _grown(getattr(self, name), used, values)
            if name in _DEFAULTS:
                grown[used:] = _DEFAULTS[name]
            setattr(self, name, grown)

    def _take_phases(self, begin: int, end: int) -> tuple[int, int]:
        """Phases of the new nodes, from ``begin`` to ``end``, and what `align` said of any node.

        Returns how many words of phase marks there are now, and the phase that holds behind them.
        """
        marks, skips = self.graph.phase_marks[self.phase_words :], self.graph.skips
        firsts, numbers = np.array(marks[::2], np.int64), np.array([self.phase_now, *marks[1::2]], np.int64)
        self.phase[begin:end] = numbers[np.searchsorted(firsts, self.first[begin:end], side="right")]
        for i in range(self.skip_words, len(skips), 2):
            self.skipped[self.producer[skips[i]]] = skips[i + 1]
        self.skip_words = len(skips)
        return self.phase_words + len(marks), int(numbers[-1])

    def _add_signatures(self) -> None:
        graph = self.graph
        if len(self.layout) == len(graph.signatures):  # which is set last: an interrupt before leaves this to do
            return
        for signature in graph.signatures[len(self.pools) :]:
            for p in signature.binding:
                if p.root.device != self.backend.name:
                    raise DeviceError(
                        f"parameter {p.name} of {signature.program.name} is on {p.root.device}, and the graph runs on "
                        f"{self.backend.name}: move it with ParameterCollection.to, or choose the device with init"
                    )
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
        self.widths = np.zeros((len(places), max(1, *(len(p) for p in places))), np.int64)
        for s, sizes in enumerate(places):
            self.widths[s, : len(sizes)] = sizes
        self._outputs = max(row[passes.OUTS] for row in rows)
        self.layout = np.array(rows, np.int64)

    @property
    def pending(self) -> np.ndarray:
        """The nodes that have not run, ascending. Plans of what was asked for alone do without this list."""
        new = np.arange(self._listed, self.nodes)
        pending = np.concatenate((self._pending, new)) if self._pending.size else new
        self._pending, self._listed = pending[self.waiting[pending]], self.nodes
        return self._pending

    # ---- forward ----------------------------------------------------------------------------------------------------

    def has(self, targets: Sequence[int]) -> bool:
        """Whether all of these values are computed."""
        seen = self.values if self._replayed is None else self._replayed.location.size
        for t in targets:  # noqa: SIM110  most reads are of one value, for which `all` is slower
            if t >= seen or self.location[t] < 0:
                return False
        return True

    def forward(self, targets: Sequence[int], join: bool = True) -> None:
        """Compute these values and what they need, and with ``join`` whatever else fills the same batches."""
        if self.has(targets):
            return
        key = None
        if join and not state.keep and not self.values and self._replayed is None:
            place = (self.backend.name, self.arena.layout)
            key = Key(self.graph, state.strategy or config.autobatch, targets, place)
            known = plans.find(key)
            if known is not None:
                self._run_again(known)
                return
        self._sync()
        wanted = np.array(targets, np.int64)
        try:
            joined = self._run_plan(wanted, join)
        except (DynbatchError, MemoryError):
            if not self._joined:
                raise
            # it may be what joined that fails: only what was asked for may
            joined = self._run_plan(wanted, join=False)
        self.executed.append(joined)
        self.waiting[joined[0]] = False
        if key is not None and joined[0].size == self.nodes and plans.wants(key):
            alive = tuple([weakref.ref(s) for s in self.graph.signatures])
            row, location = self.row[: self.nodes].copy(), self.location[: self.values].copy()
            plans.keep(key, Reusable(alive, *joined, self._tables, row, location))

    def _run_again(self, known: Reusable) -> None:
        """Run the plan of an equal graph; nothing of this one has been looked at."""
        plan = Plan("forward", state.strategy or config.autobatch)
        plan.reused = True
        begin = plan.clock()
        graph = self.graph
        self.data = _extended(self.data, self.data_size, graph.data, len(graph.data))
        self.data_size = len(graph.data)
        self._add_signatures()
        values = known.location.size
        self._make_room(values)
        before = self._before()
        try:
            self._reserve(known.starts, known.signatures)
            plan.schedule_seconds = plan.clock() - begin
            self.backend.forward(self, plan, known.tables, known.row[known.order[known.starts[:-1]]])
        except BaseException:
            self._restore(before)
            raise
        finally:
            self.arena.release_scratch()
        self.location[:values] = known.location
        self._replayed = known
        plan.run_seconds = plan.clock() - begin - plan.schedule_seconds
        self.last = plan

    def _take_over(self, known: Reusable) -> None:
        """This graph was just decoded: what a plan that was used again has computed of it, has run."""
        nodes, values = known.row.size, known.location.size
        self.row[:nodes] = known.row
        self.location[:values] = known.location
        self.waiting[:nodes] = False
        self.executed.append((known.order, known.starts, known.signatures))

    def _run_plan(self, targets: np.ndarray, join: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Schedule and run one plan; a failure leaves everything as it was."""
        strategy = state.strategy or config.autobatch
        plan = Plan("forward", strategy)
        begin = plan.clock()
        nodes, levels = self._choose(targets, join and strategy != "off")
        pending = Pending(
            nodes, self.sig, self.level, levels, len(self.pools), self.lane_group,
            self.stream, self.layout, self.pos, self.producer, self.place,
        )  # fmt: skip
        order, starts = STRATEGIES[strategy](pending)
        if strategy != "off":
            order = arrange(pending, order, starts, self.chosen)
        signatures = self.sig[order[starts[:-1]]]
        before = self._before()
        try:
            self._place(order, starts, signatures)
            self._tables = Tables(self, order, starts, signatures)
            plan.schedule_seconds = plan.clock() - begin
            self.backend.forward(self, plan, self._tables, self.row[order[starts[:-1]]])
        except BaseException:
            self._undo(order, before)
            raise
        finally:
            self.arena.release_scratch()
        plan.run_seconds = plan.clock() - begin - plan.schedule_seconds
        self.last = plan
        return order, starts, signatures

    def _choose(self, targets: np.ndarray, join: bool) -> tuple[np.ndarray, int]:
        """The nodes to run now, ascending, and how many levels they have; which are set.

        Those that the targets need, and with ``join`` also pending ones that fill the same batches.
        """
        walk = (self.stream, self.layout, self.pos, self.producer)
        self._joined = False
        if not join:
            count = passes.list_ancestors(*walk, self.row, targets, self.marked, self.found)
            nodes = np.sort(self.found[:count])
            return nodes, self._set_levels(nodes)
        pending, marked = self.pending, self.marked
        needed = passes.mark_ancestors(*walk, self.row, targets, pending, marked)
        nodes = pending if needed == pending.size else self._join(pending, pending[marked[pending]])
        levels = self._set_levels(nodes)
        marked[pending] = False
        return nodes, levels

    def _set_levels(self, nodes: np.ndarray) -> int:
        """Set the levels of these pending nodes; returns how many levels there are."""
        walk = (self.stream, self.layout, self.pos, self.producer)
        if not self.graph.phase_marks and not self.graph.skips:
            return passes.levels(*walk, self.waiting, nodes, self.level)
        deepest = np.empty(len(self.graph.phases), np.int64)
        return passes.staged_levels(*walk, self.waiting, nodes, self.phase, self.skipped, self.level, deepest)

    def _join(self, pending: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """The needed nodes, and pending ones of the same signature and level whose arguments are there by then."""
        walk = (self.stream, self.layout, self.pos, self.producer)
        group, chosen = self.place, self.chosen
        levels = self._set_levels(pending)
        key = self.level[pending] * len(self.pools) + self.sig[pending]
        group[pending] = key
        group_needed = np.zeros(levels * len(self.pools), np.bool_)
        group_needed[key[self.marked[pending]]] = True
        passes.joiners(*walk, pending, self.marked, group, group_needed, chosen)
        nodes = pending[chosen[pending]]
        group[pending] = -1
        chosen[pending] = False
        self._joined = nodes.size > needed.size
        return nodes

    def _place(self, order: np.ndarray, starts: np.ndarray, signatures: np.ndarray) -> None:
        """Give every node a row and every value a location."""
        count, base, stride = self._reserve(starts, signatures)
        passes.place_rows(
            order, starts, signatures, self.first, self.layout, count, base, stride, self.row, self.location
        )

    def _reserve(self, starts: np.ndarray, signatures: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Room for the rows of each signature; returns its first new row, and where each output's rows lie."""
        keep = state.keep
        count = np.zeros(len(self.pools), np.int64)
        base, stride = np.zeros((2, len(self.pools), self._outputs), np.int64)
        sizes: dict[int, int] = {}
        ends = starts.tolist()
        for s, lo, hi in zip(signatures.tolist(), ends, ends[1:]):
            sizes[s] = sizes.get(s, 0) + hi - lo
        for s, size in sorted(sizes.items()):
            pools = self.pools[s]
            version = pools.signature.value_version()
            if pools.version is not None and pools.version != version:
                pools.version = "mixed"
            elif pools.version is None:
                pools.version = version
            segment = pools.reserve(size, keep, self.arena)
            pools.kept = pools.kept and keep
            count[s] = pools.rows
            for o, (v, width) in enumerate(pools.outputs):
                stride[s, o] = width
                base[s, o] = segment.bases[v] - segment.first_row * width
            pools.rows += size
        return count, base, stride

    def _before(self) -> tuple[int, list[tuple[int, int, bool, Any]]]:
        """What `_restore` needs to take a plan back."""
        return self.arena.top, [(p.rows, len(p.segments), p.kept, p.version) for p in self.pools]

    def _restore(self, before: tuple[int, list[tuple[int, int, bool, Any]]]) -> None:
        self.arena.reset(before[0])
        for pools, (rows, segments, kept, version) in zip(self.pools, before[1]):
            pools.rows, pools.kept, pools.version = rows, kept, version
            del pools.segments[segments:]

    def _undo(self, order: np.ndarray, before: tuple[int, list[tuple[int, int, bool, Any]]]) -> None:
        self.row[order] = -1
        for n in order.tolist():
            first = self.first[n]
            self.location[first : first + self.layout[self.sig[n], passes.OUTS]] = -1
        self._restore(before)

    def fetch(self, vids: list[int], type: Type) -> None:
        """Values of one type that are going to be read one by one are copied together."""
        if type.size <= _READ_ALONE or self.arena.is_remote:
            self.fetched.update(zip(vids, self.read(vids, type)))

    def read(self, vids: Sequence[int], type: Type) -> np.ndarray:
        """Copies of computed values of one type, in the user's shape, with one more dimension before."""
        if self.fetched and all(v in self.fetched for v in vids):
            return np.stack([self.fetched.pop(v) for v in vids])
        if len(vids) == 1 and not self.arena.is_remote:  # as most reads are
            return self.arena.view(int(self.location[vids[0]]), type.storage).T.copy()[np.newaxis]
        found = self.arena.read(self.location[list(vids)], type.storage)
        return found if found.ndim == 2 else np.array(found.transpose(0, *range(found.ndim - 1, 0, -1)), order="C")

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: int, full: bool) -> None:
        """Add the gradients of value ``loss``, which has been computed, to those of the parameters."""
        self._sync()
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
            self.backend.backward(run, plan)
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
        if pools.version != pools.signature.value_version():
            names = ", ".join(p.name for p in binding)
            raise BackwardError(
                f"backward: parameters of {pools.signature.program.name} ({names}) changed since its values were "
                f"computed (by update() or set_value()); renew the graph and run the forward pass again"
            )


_READ_ALONE = 1 << 14
"""Elements of a value beyond which copying it takes longer than all else about reading it."""

GRAPH_WARNING = 5_000_000
"""Values in one graph beyond which a warning says that it was never renewed."""

_NONE = np.empty(0, np.int64)
_PLAIN = ("pos", "first", "fpos", "sig", "level", "found", "producer")
_DEFAULTS = {
    "row": -1, "place": -1, "lane_group": -1, "phase": 0, "skipped": 0, "waiting": True, "marked": False,
    "chosen": False, "location": -1,
}  # fmt: skip
"""What arrays over nodes and values hold before anything is known of one; the others are written as they are decoded.
"""

_idle: list[Execution] = []


def take_execution(graph: Graph) -> Execution:
    """An execution for a graph: one that an earlier graph has left, or a new one."""
    for i in range(len(_idle) - 1, -1, -1):  # the one used last, whose pages are warm
        if _idle[i].dtype.name == graph.dtype and _idle[i].backend is backend():
            execution = _idle.pop(i)
            execution.start(graph)
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
