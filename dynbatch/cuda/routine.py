"""Lowering for devices: from a Program to commands that run on one batch.

A batch is prepared on the host: its routine's steps find out where everything lies, and append commands to those of
the plan. Nothing is computed before the whole plan is prepared; so its index tables go up in one copy, its commands
follow each other without a pause, and they can be captured as a graph. What depends on parameters alone runs once a
parameter version, into memory that stays; what sums over a whole backward pass runs once at its end. Integers depend on
what was recorded alone, and are computed on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED, Program
from dynbatch.compiler.kernel_body import resolve
from dynbatch.compiler.lower import kernel_extents
from dynbatch.compiler.placement import Placement, is_vector_concatenation
from dynbatch.config import config
from dynbatch.cpu.routine import late_values
from dynbatch.cuda import lowering
from dynbatch.cuda.codegen import KernelSource, generate
from dynbatch.cuda.job import NULL, DeviceJob, Rows, rows_at
from dynbatch.cuda.sources import Kernels
from dynbatch.errors import ValidityError
from dynbatch.ops.indexing import lookup_rows
from dynbatch.signature import Signature

Step = Callable[[DeviceJob], None]


class DeviceRoutine:
    """A Program on one device.

    Arguments:
        kernels: of the device, in the Program's precision.
        program, stored, groups, forward, late_home: as of `dynbatch.cpu.routine.Routine`.
        alone: give each instruction a kernel of its own, whose result can be looked at.
        gathers: bring the rows of every operand together before an instruction reads them, by a copy where they are
            scattered; for comparisons.

    Attributes:
        alone, gathers: as given.
        steps, final: see the module.
        home, stride, part_of: where values lie; see `dynbatch.compiler.placement`.
        computed: values that batches compute into memory, in order.
    """

    def __init__(
        self,
        kernels: Kernels,
        program: Program,
        stored: frozenset[int],
        groups: dict[int, int],
        forward: DeviceRoutine | None = None,
        late_home: dict[int, tuple[int, int]] | None = None,
        alone: bool = False,
        gathers: bool = False,
    ) -> None:
        self.kernels = kernels
        self.alone = alone
        self.gathers = gathers
        self.program = program
        self.values = values = program.values
        self.stored = stored
        self.groups = groups
        self.forward = forward
        self.late_home = late_home or {}
        self.late = late_values(program)
        self.steps: list[Step] = []
        self.final: list[Step] = []
        self._shared_steps: list[Step] = []
        self._constants: dict[int, np.ndarray] = {}
        self._pairs: dict[int, tuple[int, Callable[[DeviceJob], tuple[int, int]]]] = {}
        skip = self.late | {v for v, x in enumerate(values) if x.op is not None and x.domain == SHARED}
        self.schedule = _each_alone(program, skip) if alone else fuse_elementwise(program, skip, stored)
        single = {item for item in self.schedule if not isinstance(item, Region)}
        written = {v for item in self.schedule if isinstance(item, Region) for v in item.outside}
        strided = written | {v for v in single if not is_vector_concatenation(program, v)}
        placement = Placement(program, skip, stored, self.late_home, strided)
        self.home, self.stride, self.part_of = placement.home, placement.stride, placement.part_of
        computed = {v for v in written | single if values[v].type is not None and self.home[v][0] == v}
        self._scratch = sorted(computed - stored - set(self.part_of))
        self.computed = sorted(computed)
        self._domains = sorted({value.domain for value in values if value.domain > ROW})
        self._lower_shared()
        self._lower_batch()
        self._lower_final()

    # ---- what runs when ---------------------------------------------------------------------------------------------

    def prepare(self, job: DeviceJob) -> None:
        """Append the commands of one batch."""
        job.shared = self.shared_addresses(job)
        self._count_elements(job)
        for v in self._scratch:
            job.places[v] = job.arena.scratch(job.counts[self.values[v].domain] * self.size(v))
        for v, (owner, column) in sorted(self.part_of.items(), reverse=True):
            job.places[v] = job.places[owner] + column
        for step in self.steps:
            step(job)

    def finish(self, job: DeviceJob) -> None:
        """Append the commands of the final steps, for all rows of a signature in a backward pass."""
        job.shared = self.shared_addresses(job)
        self._count_elements(job)
        for a, (owner, column) in self.late_home.items():
            job.places[a] = job.places[owner] + column
        for step in self.final:
            step(job)

    def _count_elements(self, job: DeviceJob) -> None:
        for domain in self._domains:
            job.counts[domain] = job.tables.elements(job.b, self._list_of(domain))

    def pair(self, job: DeviceJob, v: int) -> tuple[np.ndarray, int, int]:
        """For the gradient of a lookup table, in the final steps: ids, and place and distance of the rows to add."""
        index, find = self._pairs[v]
        return self.integers(job, index), *find(job)

    def factors(self, signature: Signature) -> list[Any]:
        """The weights that are prepared for its products; none here."""
        return []

    def cost(self, job: DeviceJob) -> tuple[str, int, int]:
        """Name, rows, and bytes of operands, weights and results of a batch, each read or written once."""
        elements = 0
        for v, value in enumerate(self.values):
            if value.type is not None and (value.op is None or v in self.stored):
                elements += value.type.size * (job.counts[value.domain] if value.kind != "table" else 0)
        return self.program.name, job.rows, elements * job.arena.itemsize

    def check_final(self, job: DeviceJob) -> None:
        """Look at what the final steps have computed; raises `ValidityError`."""
        for v in sorted(self.late):
            if v in job.places:
                self._refuse_bad(
                    job,
                    v,
                    job.arena.read(np.array([job.places[v]]), self.values[v].type.storage),  # type: ignore[union-attr]
                    "over all its batches",
                )

    def shared_addresses(self, job: DeviceJob) -> dict[int, int]:
        """Where parameters lie, and what depends on them alone, which is computed once a version."""
        signature, version = job.signature, job.signature.version()
        key = (self, "shared")
        known = signature.cache.get(key)
        if known is None:
            known = signature.cache[key] = _SharedBlocks(self, job)
        if known.version != version:
            known.version = version
            job.commands.bound.append(known)
            known.bind(self, job)
        return known.addresses

    def check(self, job: DeviceJob, where: str, finite: bool) -> None:
        """Look at each value of a batch that has run, in order (with ``alone``).

        Raises:
            ValidityError: one has a NaN or an infinity, where ``finite``; under ``debug``, an op refuses its operands.
        """
        for v in self.computed:
            value = self.values[v]
            assert value.op is not None
            if config.debug and value.op.checks_in_debug:
                value.op.numpy(*(self._fetch(job, a) for a in value.args), **dict(value.attrs))
            if finite:
                self._refuse_bad(job, v, self._fetch(job, v), where)

    def _refuse_bad(self, job: DeviceJob, v: int, found: np.ndarray, where: str) -> None:
        op = self.values[v].op
        assert op is not None
        if not np.isfinite(found).all():
            what = "NaN" if np.isnan(found).any() else "infinity"
            inside = f" in {self.program.name}" if op.name != self.program.name else ""
            raise ValidityError(f"{what} computed by {op.name}{inside}, {where} ({job.rows} rows)")

    def _fetch(self, job: DeviceJob, v: int) -> np.ndarray:
        """A value of a batch that has run, as the NumPy references take it."""
        value = self.values[v]
        if value.type is None:
            return self.integers(job, v)
        rows = self.rows(v)(job)
        count, item = job.counts[value.domain], job.arena.itemsize
        if not rows.follows:
            where = self._host_places(job, v)
        else:
            where = int(rows.base) // item + int(rows.place) + np.arange(count) * int(rows.stride)
        return job.arena.read(where, value.type.storage) if count else np.empty((0, *value.type.storage))

    def _host_places(self, job: DeviceJob, v: int) -> np.ndarray:
        source, column = self.home[v]
        value = self.values[source]
        if value.kind == "arg":
            return job.tables.arg_column(job.b, value.index)[0] + column
        return job.tables.list_segments(job.b, value.index)[1] + column

    # ---- what lowering asks -----------------------------------------------------------------------------------------

    def size(self, v: int) -> int:
        """Elements of one row of a value."""
        type = self.values[v].type
        assert type is not None
        return type.size

    def place(self, v: int) -> Callable[[DeviceJob], tuple[int, int]]:
        """How to find where the first row of a value lies that follow each other, and their distance."""
        source, column = self.home[v]
        self._locate(source)
        stride = self.stride[source] if self.values[source].kind != "float" else 1
        return lambda job: (job.places[source] + column, stride)

    def rows(self, v: int) -> Callable[[DeviceJob], Rows]:
        """How to find the rows of an operand, wherever they lie."""
        value = self.values[v]
        if value.domain == SHARED and v not in self.late:
            return lambda job: Rows(np.uint64(job.shared[v]), NULL, np.int64(0), np.int64(0))
        source, column = self.home[v]
        kind, index, width = self.values[source].kind, self.values[source].index, self.size(source)
        brought = self.gathers or source in self._known
        if kind == "arg" and not brought:
            return lambda job: job.argument(index, column, width)
        if kind == "list" and not brought:
            return lambda job: job.elements(index, column, width)
        find = self.place(v)
        return lambda job: rows_at(*find(job))

    def boundaries(self, v: int) -> Callable[[DeviceJob], int]:
        """How to find where each row's list elements begin and end."""
        index = self._list_of(self.values[v].index)
        return lambda job: job.boundaries(index)

    def integer_address(self, v: int) -> Callable[[DeviceJob], int]:
        """How to find a column of integers."""
        value = self.values[v]
        if value.kind in ("int", "data"):
            return lambda job: job.integer_column(value.index)

        def address(job: DeviceJob) -> int:
            self.integers(job, v)
            return job.integers[v][0]

        return address

    def integers(self, job: DeviceJob, v: int) -> np.ndarray:
        """A column of integers on the host; what was computed goes up with the tables."""
        value = self.values[v]
        if value.kind in ("int", "data"):
            return job.tables.int_column(job.b, value.index)
        if value.kind == "ptr":
            return job.tables.list_segments(job.b, self._list_of(value.index))[0]
        if v not in job.integers:
            assert value.op is not None
            column = value.op.numpy(*(self.integers(job, a) for a in value.args), **dict(value.attrs))
            job.integers[v] = job.arena.uploads.put(column), column
        return job.integers[v][1]

    def _list_of(self, domain: int) -> int:
        return next(k for k, g in self.groups.items() if g == domain)

    def add(self, step: Step) -> None:
        """Append a step to those that are being lowered."""
        self._into.append(step)

    # ---- lowering ---------------------------------------------------------------------------------------------------

    def _locate(self, v: int) -> None:
        """Before the next step, rows of an input are brought to where they follow each other, once."""
        value = self.values[v]
        if value.op is not None or v in self._known:
            return
        self._known.add(v)
        index = value.index
        if value.kind == "fwd":
            self.add(lambda job: job.places.__setitem__(v, job.kept(index)))
        elif value.kind == "dout":
            width = self.size(v)
            self.add(lambda job: job.places.__setitem__(v, job.pull(v, index, width)))
        elif value.kind == "float":
            item = np.dtype(self.kernels.dtype).itemsize
            self.add(lambda job: job.places.__setitem__(v, job.float_column(index) // item))
        elif value.kind == "data":
            width = self.size(v)
            self.add(lambda job: job.places.__setitem__(v, job.data_rows(index, width)))
        else:
            width, domain = self.size(v), value.domain
            find = _argument if value.kind == "arg" else _elements

            def bring(job: DeviceJob) -> None:
                count = job.counts[domain]
                rows = find(job, index, width)
                if rows.follows and (rows.stride or count == 1):
                    job.places[v] = int(rows.place)
                    return
                job.places[v] = job.arena.scratch(count * width)
                job.gathered += count * width
                job.copy(rows, count, width, job.places[v], width)

            self.add(bring)

    def _begin(self, into: list[Step]) -> None:
        self._into = into
        self._known: set[int] = set()

    def _lower_shared(self) -> None:
        """What depends on parameters alone, and what depends on nothing."""
        self._begin(self._shared_steps)
        for v, value in enumerate(self.values):
            if value.op is None or value.domain != SHARED or v in self.late:
                continue
            if all(a in self._constants for a in value.args):
                found = value.op.numpy(*(self._constants[a] for a in value.args), **dict(value.attrs))
                self._constants[v] = np.ascontiguousarray(found)
                continue
            home, column = resolve(self.program, v, shared=True)
            if home != v:
                self.add(_alias(v, home, column * np.dtype(self.kernels.dtype).itemsize))
            else:
                lowering.lower(self, v)

    def _lower_batch(self) -> None:
        self._begin(self.steps)
        for v in sorted(self.stored):
            value = self.values[v]
            if value.kind == "dout":
                self._locate(v)  # brought to where it is stored, though nothing here may read it
            elif value.op is None and value.domain != SHARED:
                self._store(v)
        for item in self.schedule:
            if isinstance(item, Region):
                self._kernel(item)
            elif self.values[item].type is not None and self.home[item][0] == item:
                lowering.lower(self, item)
        for v in sorted(self.stored):
            if self.values[v].domain == SHARED and v not in self.late:
                self._store(v)

    def _lower_final(self) -> None:
        self._begin(self.final)
        self._known |= self.stored
        for v in sorted(self.late):
            if self.values[v].op is lookup_rows:
                index, rows = self.values[v].args
                self._pairs[v] = index, self.place(rows)
            else:
                size = self.size(v)
                self.add(lambda job, v=v, size=size: job.places.__setitem__(v, job.arena.scratch(size)))  # type: ignore[misc]
                lowering.lower(self, v)

    def _store(self, v: int) -> None:
        """Store an input, or what all rows share, once a row."""
        find, width, domain = self.rows(v), self.size(v), max(self.values[v].domain, ROW)

        def step(job: DeviceJob) -> None:
            job.copy(find(job), job.counts[domain], width, job.destination[v], width)

        self.add(step)

    def _kernel(self, region: Region) -> None:
        """One generated kernel."""
        source = generate(self.program, region, self.kernels.dtype, self.gathers)
        kernel = self.kernels.generated(source.text)
        sizes = [np.int32(size) for size in source.sizes]
        numbers: list[Callable[[DeviceJob], tuple[int, ...]]] = []
        arrays: list[Callable[[DeviceJob], int]] = []
        for operand in source.operands:
            self._operand(source, operand, numbers, arrays)
        outputs = [(self.home[v], self.stride[self.home[v][0]]) for v in source.outputs]

        def step(job: DeviceJob) -> None:
            count = job.counts[source.domain]
            if not count:
                return
            integers = [n for find in numbers for n in find(job)]
            for (home, column), stride in outputs:
                integers += (job.places[home] + column, stride)
            if source.scratch:
                integers.append(job.arena.scratch(count * source.scratch))
            job.run_kernel(
                self.program.name, kernel, source.launch(count), NULL, np.int64(count), *sizes,
                *map(np.int64, integers), *(np.uint64(find(job)) for find in arrays),
            )  # fmt: skip

        self.add(step)

    def _operand(
        self,
        source: KernelSource,
        operand: Any,
        numbers: list[Callable[[DeviceJob], tuple[int, ...]]],
        arrays: list[Callable[[DeviceJob], int]],
    ) -> None:
        """Arguments for an operand of a generated kernel."""
        v, column, index = operand.value, operand.column, self.values[operand.value].index
        if operand.kind == "affine":
            find = self.place(v)
            numbers.append(lambda job: (find(job)[0] + column, find(job)[1]))
        elif operand.kind == "index":
            numbers.append(lambda job: (column,))
            if self.values[v].kind == "arg":
                arrays.append(lambda job: job.argument_column(index))
            else:
                arrays.append(lambda job: job.element_column(index))
        elif operand.kind == "shared":
            arrays.append(lambda job: job.shared[v])
        elif operand.kind == "integer":
            arrays.append(self.integer_address(v))
        elif operand.kind == "boundaries":
            if source.domain > ROW:
                numbers.append(lambda job: (job.rows,))
            arrays.append(self.boundaries(v))
        else:
            arrays.append(lambda job: job.float_column(index))


def _argument(job: DeviceJob, index: int, width: int) -> Rows:
    return job.argument(index, 0, width)


def _elements(job: DeviceJob, index: int, width: int) -> Rows:
    return job.elements(index, 0, width)


def _alias(v: int, home: int, offset: int) -> Step:
    return lambda job: job.shared.__setitem__(v, job.shared[home] + offset)


def _each_alone(program: Program, skip: Iterable[int]) -> list[Region | int]:
    """A schedule in which each instruction runs by itself."""
    found: list[Region | int] = []
    for v, value in enumerate(program.values):
        if value.op is None or v in skip:
            continue
        extents = kernel_extents(program, v)
        if extents is None or resolve(program, v) != (v, 0):
            found.append(v)
        else:
            region = Region(value.domain, extents)
            region.members, region.outside = [v], {v}
            found.append(region)
    return found


class _SharedBlocks:
    """Addresses of what all rows of a signature's batches share; memory for what is computed of it."""

    def __init__(self, routine: DeviceRoutine, job: DeviceJob) -> None:
        self.version: Any = None
        self.addresses: dict[int, int] = {}
        self._driver = job.driver
        self._owned: dict[int, int] = {}
        item = job.arena.itemsize
        values = routine.program.values
        for v, array in routine._constants.items():
            self._owned[v] = self._driver.allocate(array.nbytes)
            self._driver.upload(self._owned[v], array)
        for v, value in enumerate(values):
            if value.op is None or value.domain != SHARED or v in routine.late or v in self._owned:
                continue
            if resolve(routine.program, v, shared=True)[0] == v:
                self._owned[v] = self._driver.allocate(routine.size(v) * item)

    def __del__(self) -> None:
        for address in self._owned.values():
            self._driver.discard(address)

    def bind(self, routine: DeviceRoutine, job: DeviceJob) -> None:
        """Find the parameters, and compute what depends on them."""
        self.addresses.clear()
        self.addresses.update(self._owned)
        for v, value in enumerate(routine.program.values):
            if value.kind in ("slot", "table"):
                self.addresses[v] = job.signature.binding[value.index].device_values(job.driver)
        if routine.forward is not None:
            source = None
            for v, value in enumerate(routine.program.values):
                if value.kind == "fwd" and value.domain == SHARED:
                    source = source or routine.forward.shared_addresses(job)
                    self.addresses[v] = source[value.index]
        places = {v: address // job.arena.itemsize for v, address in self._owned.items()}
        shared = job.for_shared(self.addresses, places)
        for step in routine._shared_steps:
            step(shared)
