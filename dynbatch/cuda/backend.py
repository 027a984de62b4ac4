"""The CUDA backend: prepares a whole plan on the host, sends its index tables up in one copy, and runs its commands.

Nothing waits for the device inside a plan, and nothing comes down but what is asked for. A plan that is used again
(`dynbatch.batching.reuse`) is captured as a graph the second time that it runs.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.batching.plan import Plan, Tables
from dynbatch.config import config
from dynbatch.cuda import launches
from dynbatch.cuda.devices import driver
from dynbatch.cuda.job import NULL, Commands, DeviceBackwardJob, DeviceJob, DeviceTables
from dynbatch.cuda.memory import DeviceArena, Uploads
from dynbatch.cuda.profile import profiler
from dynbatch.cuda.routine import DeviceRoutine
from dynbatch.cuda.sources import Kernels
from dynbatch.graph import state

if TYPE_CHECKING:
    from dynbatch.batching.backward_run import BackwardRun
    from dynbatch.batching.execution import Execution
    from dynbatch.cpu.code import ForwardCode, GradientCode


class CudaBackend:
    """See the module.

    Attributes:
        name: of the device, such as ``"cuda:0"``.
        driver: of the device.
        like_dynet: for comparisons: each instruction is a kernel of its own, which reads a gathered copy of each
            operand whose rows are scattered, and nothing is captured.
    """

    like_dynet = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = driver(name)
        self._kernels = functools.cache(functools.partial(Kernels, self.driver))

    def arena(self, dtype: str) -> DeviceArena:
        """Memory for a graph."""
        return DeviceArena(self._kernels(dtype))

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, execution: Execution, plan: Plan, tables: Tables, first_rows: np.ndarray) -> None:
        """Run the batches of a plan, whose first rows in their signatures' pools these are."""
        if plan.reused and not self._in_steps() and profiler.current is None and not self.like_dynet:
            self._forward_again(execution, plan, tables, first_rows)
            return
        with _Preparation(self, execution.arena) as prepared:
            self._prepare(execution, plan, tables, first_rows, prepared)

    def _prepare(
        self, execution: Execution, plan: Plan, tables: Tables, first_rows: np.ndarray, prepared: _Preparation
    ) -> None:
        arena, keep, clock = execution.arena, state.keep, plan.clock
        device_tables = DeviceTables(tables, arena)
        for b, (s, row) in enumerate(zip(tables.signature_list, first_rows.tolist())):
            begin = clock()
            pools, rows = execution.pools[s], tables.rows(b)
            routine = self._forward_routine(arena.kernels, pools.code, keep)
            job = DeviceJob(
                arena, device_tables, b, pools.signature, rows, execution.data, pools.destination(row, rows),
                prepared.commands,
            )  # fmt: skip
            routine.prepare(job)
            prepared.end_batch(routine, job, f"batch {b} of the plan")
            plan.add(routine, job, clock() - begin, pools.shapes)
            arena.release_scratch()
        plan.show_in_debug()

    def _forward_again(self, execution: Execution, plan: Plan, tables: Tables, first_rows: np.ndarray) -> None:
        """Run a plan that has run before: from its captured graph, or as always, capturing it for the next time."""
        arena = execution.arena
        signatures = [execution.pools[s].signature for s in dict.fromkeys(tables.signature_list)]
        layouts = tuple(p.root.state[1] for signature in signatures for p in signature.binding)
        captured = tables.forms.get("captured")
        if captured is None or captured.arena() is not arena or captured.layouts != layouts:
            uploads, arena.uploads = arena.uploads, Uploads(self.driver, tables.nbytes)
            try:
                with _Preparation(self, arena, runs=False) as prepared:
                    self._prepare(execution, plan, tables, first_rows, prepared)
                captured = tables.forms["captured"] = _Captured(arena, layouts, prepared.commands, plan)
            finally:
                arena.uploads = uploads
        else:
            captured.refresh(self, execution, tables, plan)
        captured.run(self)

    def _forward_routine(self, kernels: Kernels, code: ForwardCode, keep: bool) -> DeviceRoutine:
        like_dynet, alone = self.like_dynet, self.like_dynet or _alone(code)
        key = (kernels, keep, alone, like_dynet)
        found = code.devices.get(key)
        if found is None:
            found = code.devices[key] = DeviceRoutine(
                kernels, code.program, frozenset(code.stored[keep]), code.program.groups, alone=alone,
                gathers=like_dynet,
            )  # fmt: skip
        return found

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, run: BackwardRun, plan: Plan) -> None:
        """Run the batches, then what sums over all of them, and add to the gradients of parameters."""
        x, clock = run.x, plan.clock
        arena = x.arena
        with _Preparation(self, arena) as prepared:
            tables = DeviceTables(run.tables, arena)
            for b in range(run.signatures.size - 1, -1, -1):
                begin = clock()
                s = run.tables.signature_list[b]
                pools, nodes = x.pools[s], run.nodes(b)
                routine = self._gradient_routine(arena.kernels, run.codes[s])
                job = self._job(run, tables, b, s, nodes, bool(run.runs[b]), run.destination(b), prepared.commands)
                routine.prepare(job)
                prepared.end_batch(routine, job, f"batch {b} of the plan")
                plan.add(routine, job, clock() - begin, pools.shapes)
                arena.release_scratch()
            plan.show_in_debug()
            self._finish(run, prepared)

    def _job(
        self,
        run: BackwardRun,
        tables: DeviceTables,
        b: int,
        s: int,
        nodes: np.ndarray,
        follows: bool,
        destination: dict[int, int],
        commands: Commands,
    ) -> DeviceBackwardJob:
        x = run.x
        pools = x.pools[s]
        job = DeviceBackwardJob(x.arena, tables, b, pools.signature, nodes.size, x.data, destination, commands)
        job.pools, job.nodes_row, job.run = pools, x.row[nodes], follows
        job.first, job.edges = x.first[nodes], run.edges
        return job

    def _finish(self, run: BackwardRun, prepared: _Preparation) -> None:
        """Gradients of parameters, each over all rows of a signature; none is added before all are there."""
        arena = run.x.arena
        tables: Any = None
        found: list[tuple[DeviceRoutine, DeviceBackwardJob, GradientCode]] = []
        for final in run.finals():
            s, code = final.signature, run.codes[final.signature]
            tables = tables or DeviceTables(final.tables, arena)
            routine = self._gradient_routine(arena.kernels, code)
            bases = dict(run.bases[s])
            job = self._job(run, tables, final.b, s, final.nodes, final.follows, bases, prepared.commands)
            routine.finish(job)
            prepared.end_final(routine, job)
            found.append((routine, job, code))
        rounds: list[dict[int, tuple[int, int]]] = []  # a parameter that several signatures use is in several
        for routine, job, code in found:
            for kind, slot, v in code.slots:
                parameter = job.signature.binding[slot]
                if kind == "table":
                    self._add_rows(job, parameter, *routine.pair(job, v))
                    continue
                to, size = parameter.device_gradient(self.driver), routine.size(v)
                at = job.places[v] * arena.itemsize if v in job.places else job.shared[v]
                free = next((r for r in rounds if to not in r), None)
                if free is None:
                    rounds.append(free := {})
                free[to] = at, size
        for parts in rounds:
            to, rest = np.array(list(parts)), np.array(list(parts.values()))
            put = arena.uploads.put
            job.run_kernel(
                "add_parts", job.kernels.fixed("add_parts"), launches.parts(len(parts), int(rest[:, 1].max())),
                np.uint64(put(to)), np.uint64(put(rest[:, 0])), np.uint64(put(rest[:, 1])), np.int64(len(parts)),
            )  # fmt: skip

    def _add_rows(self, job: DeviceBackwardJob, table: Any, ids: np.ndarray, place: int, stride: int) -> None:
        """Add gradients of rows to those of a lookup table, in the order of the rows."""
        if not ids.size:
            return
        order = np.argsort(ids, kind="stable")
        rows, starts = np.unique(ids[order], return_index=True)
        put, width = job.arena.uploads.put, table.type.size
        table.touch(ids)
        launch = launches.teams(rows.size, width, launches.vector(job.kernels.dtype))
        job.run_kernel(
            "lookup_gradient", job.kernels.fixed("lookup_gradient"), launch,
            np.uint64(table.gradients_on(self.driver).target), np.int64(rows.size), np.int32(width),
            np.uint64(put(rows)), np.uint64(put(np.append(starts, ids.size))), np.uint64(put(place + stride * order)),
            NULL,
        )  # fmt: skip

    def _gradient_routine(self, kernels: Kernels, code: GradientCode) -> DeviceRoutine:
        like_dynet, alone = self.like_dynet, self.like_dynet or _alone(code)
        key = (kernels, alone, like_dynet)
        found = code.devices.get(key)
        if found is None:
            forward = self._forward_routine(kernels, code.forward, True)
            found = code.devices[key] = DeviceRoutine(
                kernels, code.program, frozenset(code.stored), code.forward.program.groups, forward, code.late_home,
                alone, like_dynet,
            )  # fmt: skip
        return found

    # ---- running ----------------------------------------------------------------------------------------------------

    def _in_steps(self) -> bool:
        """Whether each batch runs before the next one is prepared: to be looked at, or since zones are watched."""
        return config.check_validity or config.debug or self.driver.red_zone > 0


def _alone(code: Any) -> bool:
    """Whether each instruction of a Program is to run by itself, so that a check names the op."""
    return config.check_validity or (config.debug and code.checks)


class _Preparation:
    """A plan while it is prepared; at the end its tables go up, and its commands run.

    Attributes:
        commands: so far.
    """

    def __init__(self, backend: CudaBackend, arena: DeviceArena, runs: bool = True) -> None:
        self.commands = Commands()
        self._arena, self._runs = arena, runs
        self._in_steps = backend._in_steps()

    def __enter__(self) -> _Preparation:
        self._arena.driver.free_discarded()
        self._arena.uploads.reset()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.commands.unbind()
        elif self._runs:
            self._run()

    def _run(self) -> None:
        self._arena.uploads.flush()
        self.commands.run(self._arena.driver)

    def end_batch(self, routine: DeviceRoutine, job: DeviceJob, where: str) -> None:
        """A batch has been prepared."""
        self.commands.end_batch(routine, job)
        if self._in_steps:
            self._run()
            if routine.alone:
                routine.check(job, where, config.check_validity)

    def end_final(self, routine: DeviceRoutine, job: DeviceJob) -> None:
        """What sums over all rows of a signature has been prepared."""
        if self._in_steps:
            self._run()
            if config.check_validity:
                routine.check_final(job)


class _Captured:
    """A plan's commands as a graph of the driver, with tables of its own on the device.

    Attributes:
        arena: weakly, where its values lie.
        layouts: of the parameters that it reads.
    """

    def __init__(self, arena: DeviceArena, layouts: tuple[int, ...], commands: Commands, plan: Plan) -> None:
        self.arena = weakref.ref(arena)
        self.layouts = layouts
        self._uploads = arena.uploads
        self._reports = plan.batch_reports
        self._shared = commands.shared
        driver = arena.driver
        driver.begin_capture()
        try:
            for _, function, args in commands.batches:
                function(*args)
        finally:
            self._graph = driver.end_capture()
        self._routines = [(routine, job) for routine, job, _ in commands.ends]

    def refresh(self, backend: CudaBackend, execution: Execution, tables: Tables, plan: Plan) -> None:
        """Take parameters as they are now, and values given by the user, of which there may be new ones."""
        plan.batch_reports = self._reports
        commands = Commands()
        for routine, job in self._routines:
            job.commands = commands
            routine.shared_addresses(job)
        self._shared = commands.shared
        self._uploads.renew_data(execution.data)

    def run(self, backend: CudaBackend) -> None:
        """Run it."""
        self._uploads.flush()
        for _, function, args in self._shared:
            function(*args)
        self._shared = []
        backend.driver.launch_graph(self._graph)
