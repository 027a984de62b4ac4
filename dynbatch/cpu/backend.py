"""The CPU backend: runs plans batch by batch, each in the tier that its Program has reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.batching.plan import Plan, Tables
from dynbatch.compiler.ir import ROW
from dynbatch.config import config
from dynbatch.cpu.job import BackwardJob, Job
from dynbatch.cpu.memory import Arena
from dynbatch.cpu.pools import Pools
from dynbatch.cpu.routine import check_finite
from dynbatch.cpu.threads import plan_threads
from dynbatch.cpu.tiers import is_hot
from dynbatch.graph import state

if TYPE_CHECKING:
    from dynbatch.batching.backward_run import BackwardRun
    from dynbatch.batching.execution import Execution


class CpuBackend:
    """See the module.

    Attributes:
        name: of the device.
    """

    name = "cpu"

    def arena(self, dtype: str) -> Arena:
        """Memory for a graph."""
        return Arena(dtype)

    def forward(self, execution: Execution, plan: Plan, tables: Tables, first_rows: np.ndarray) -> None:
        """Run the batches of a plan, whose first rows in their signatures' pools these are."""
        keep, check = state.keep, config.check_validity
        clock, arena, data = plan.clock, execution.arena, execution.data
        tables.forms.clear()
        with plan_threads():
            for b, (s, row) in enumerate(zip(tables.signature_list, first_rows.tolist())):
                begin = clock()
                pools = execution.pools[s]
                code, rows = pools.code, tables.rows(b)
                # the NumPy tier sees every value, so that a check names the op
                routine = code.routine(keep, not check and is_hot(code.digest, rows), pools.tables_are_small)
                job = Job(arena, tables, b, pools.signature, rows, data, pools.destination(row, rows))
                routine.run(job)
                plan.add(routine, job, clock() - begin, pools.shapes)
                arena.release_scratch()
        plan.show_in_debug()

    def backward(self, run: BackwardRun, plan: Plan) -> None:
        """Run the batches, then what sums over all of them, and add to the gradients of parameters."""
        with plan_threads():
            self._batches(run, plan)
            found = self._finish(run)
        for parameter, gradient in found:
            if isinstance(gradient, tuple):
                parameter.add_gradient(*gradient)
            else:
                parameter.grad[...] += gradient

    def _batches(self, run: BackwardRun, plan: Plan) -> None:
        x, clock = run.x, plan.clock
        for b in range(run.signatures.size - 1, -1, -1):
            begin = clock()
            s = run.tables.signature_list[b]
            pools, code = x.pools[s], run.codes[s]
            nodes = run.nodes(b)
            routine = code.routine(not config.check_validity and is_hot(code.digest, nodes.size))
            job = self._job(run, run.tables, b, pools, nodes, bool(run.runs[b]), run.destination(b))
            routine.run(job)
            plan.add(routine, job, clock() - begin, pools.shapes)
            x.arena.release_scratch()
        plan.show_in_debug()

    def _job(
        self,
        run: BackwardRun,
        tables: Tables,
        b: int,
        pools: Pools,
        nodes: np.ndarray,
        follows: bool,
        destination: dict[int, int],
    ) -> BackwardJob:
        x = run.x
        job = BackwardJob(x.arena, tables, b, pools.signature, nodes.size, x.data, destination)
        job.pools, job.nodes_row, job.run = pools, x.row[nodes], follows
        job.first, job.edges = x.first[nodes], run.edges
        return job

    def _finish(self, run: BackwardRun) -> list[tuple[Any, Any]]:
        """Gradients of parameters: one product or sum over all rows of a signature."""
        found: list[tuple[Any, Any]] = []
        for final in run.finals():
            pools, code = run.x.pools[final.signature], run.codes[final.signature]
            routine = code.routine(not config.check_validity and is_hot(code.digest, 0))
            job = self._job(run, final.tables, final.b, pools, final.nodes, final.follows, {})
            frame = routine.frame(job)
            for v, value in enumerate(code.program.values):
                if value.kind == "fwd" and value.domain == ROW:
                    frame.location[v] = job.kept(value.index)
            for v in code.stored:
                frame.location[v] = run.bases[final.signature][v]
            for step in routine.final:
                step(frame)
            if config.check_validity:
                check_finite(frame, "over all its batches", sorted(routine.late))
            for kind, slot, v in code.slots:
                array = frame.array(v)
                found.append((pools.signature.binding[slot], array if kind == "table" else array[0]))
        return found
