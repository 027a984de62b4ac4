"""One batch on its way to a device: where everything lies, and the commands that will run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynbatch.compiler.ir import ROW, SHARED
from dynbatch.cuda.edges import count_edges, list_edges
from dynbatch.cuda.launches import Launch, teams, vector
from dynbatch.cuda.memory import DeviceArena
from dynbatch.cuda.profile import profiler
from dynbatch.errors import DeviceError

if TYPE_CHECKING:
    from dynbatch.batching.plan import Tables
    from dynbatch.cpu.job import Edges
    from dynbatch.cpu.pools import Pools
    from dynbatch.cuda.driver import Driver
    from dynbatch.signature import Signature

NULL = np.uint64(0)
"""The memory that kernels are given, and what stands for no array; see `dynbatch.cuda.memory`."""

Command = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""What is asked of the driver, by the name of the kernel or product."""


class Commands:
    """Those of a plan.

    Attributes:
        shared: what computes values that depend on parameters alone, from the parameters as they are now; comes first.
        batches: those of the batches, and what sums over them.
        ends: for each batch its routine, its job, and how many of ``batches`` there are by its end.
        bound: what holds such values, to be computed again where a plan fails before it runs.
    """

    def __init__(self) -> None:
        self.shared: list[Command] = []
        self.batches: list[Command] = []
        self.ends: list[tuple[Any, DeviceJob, int]] = []
        self.bound: list[Any] = []

    def end_batch(self, routine: Any, job: DeviceJob) -> None:
        """All commands of a batch are there."""
        self.ends.append((routine, job, len(self.batches)))

    def run(self, driver: Driver) -> None:
        """Run them, and begin anew."""
        if profiler.current is not None:
            profiler.run(driver, self)
        else:
            done = -len(self.shared)
            try:
                with driver.session():
                    for _, function, args in (*self.shared, *self.batches):
                        function(*args)
                        done += 1
            except DeviceError as error:
                raise self._in_its_batch(error, done) from error
        self.shared.clear()
        self.batches.clear()
        self.ends.clear()
        self.bound.clear()

    def _in_its_batch(self, error: DeviceError, done: int) -> DeviceError:
        """The error that command ``done`` has met, with the name of its batch."""
        for routine, job, end in self.ends:
            if 0 <= done < end:
                return DeviceError(f"{error}, in batch {job.b} of the plan, {routine.program.name} ({job.rows} rows)")
        return error

    def unbind(self) -> None:
        """The commands have not run."""
        for blocks in self.bound:
            blocks.version = None


class Rows(NamedTuple):
    """Where the rows of an operand lie, as kernels take it: ``OPERAND`` in ``kernels/common.cuh``.

    Attributes:
        base: address that the rest is counted from.
        offsets: address of each row's place, or null where rows lie at equal distances.
        place: of the first row, or what is added to each row's.
        stride: of rows; 0 where one is for all.
    """

    base: np.uint64
    offsets: np.uint64
    place: np.int64
    stride: np.int64

    @property
    def follows(self) -> bool:
        """Whether rows lie at equal distances."""
        return not self.offsets


def rows_at(place: int, stride: int) -> Rows:
    """Rows at equal distances."""
    return Rows(NULL, NULL, np.int64(place), np.int64(stride))


class DeviceTables:
    """Index tables of a plan, and where they lie on the device once `Uploads.flush` was called."""

    def __init__(self, tables: Tables, arena: DeviceArena) -> None:
        self.host = tables
        self.table = arena.uploads.put(tables.table)
        self.reals = arena.uploads.put(tables.floats_as(arena.dtype))


class DeviceJob:
    """A batch of a forward plan, as `dynbatch.cpu.job.Job` is for the CPU.

    Attributes:
        arena, tables, b, signature, rows, destination, gathered, viewed: as there.
        data: values given by the user, on the host.
        commands: of the plan so far.
        counts: how many rows there are in each domain.
        places: for each value whose rows lie at equal distances: where the first one does.
        shared: for each value that all rows share: its address.
        integers: for each integer value that was computed: where its column lies, and the column.
    """

    def __init__(
        self,
        arena: DeviceArena,
        tables: DeviceTables,
        b: int,
        signature: Signature,
        rows: int,
        data: np.ndarray,
        destination: dict[int, int],
        commands: Commands,
    ) -> None:
        self.arena = arena
        self.kernels = arena.kernels
        self.driver = arena.driver
        self.tables = tables.host
        self._device_tables = tables
        self.b = b
        self.signature = signature
        self.rows = rows
        self.data = data
        self.destination = destination
        self.commands = commands
        self.into = commands.batches
        self.counts = {ROW: rows, SHARED: 1}
        self.places: dict[int, int] = dict(destination)
        self.shared: dict[int, int] = {}
        self.integers: dict[int, tuple[int, np.ndarray]] = {}
        self.gathered = self.viewed = 0
        self.tier = "cuda"
        self._args, self._ints, self._lists, self._floats, _, _ = tables.host.header(b)

    def for_shared(self, addresses: dict[int, int], places: dict[int, int]) -> DeviceJob:
        """A job that computes what all rows share of this signature, given where that lies."""
        job = DeviceJob(
            self.arena, self._device_tables, self.b, self.signature, 1, self.data, places, self.commands
        )  # fmt: skip
        job.shared = addresses
        job.into = self.commands.shared
        return job

    # ---- commands ---------------------------------------------------------------------------------------------------

    def launch(self, name: str, launch: Launch, *args: Any) -> None:
        """Run a fixed kernel, with null for its memory before these arguments."""
        self.run_kernel(name, self.kernels.fixed(name), launch, NULL, *args)

    def run_kernel(self, name: str, kernel: Any, launch: Launch, *args: Any) -> None:
        """Run a kernel."""
        self.into.append((name, self.driver.launch, (kernel, launch.grid, launch.block, 0, args)))

    def multiply(self, count: int, *args: Any) -> None:
        """A product, or with a count as many of them; arguments as the driver takes them behind the type."""
        dtype = self.kernels.dtype
        if count < 0:
            self.into.append(("gemm", self.driver.gemm, (dtype, *args)))
        else:
            self.into.append(("gemm", self.driver.gemm_strided_batched, (dtype, *args, count)))

    def copy(self, source: Rows, count: int, width: int, place: int, stride: int) -> None:
        """Copy rows to where they follow each other."""
        launch = teams(count, width, vector(self.kernels.dtype))
        rows, size = np.int64(count), np.int32(width)
        to = np.int64(place), np.int64(stride)
        if source.follows:
            start = source.place + np.int64(int(source.base) // self.arena.itemsize)
            self.launch("copy_rows", launch, rows, size, *to, start, source.stride)
        else:
            self.launch("gather", launch, rows, size, *to, source.base, source.offsets, source.place)

    # ---- index tables -----------------------------------------------------------------------------------------------

    def argument(self, index: int, column: int, width: int) -> Rows:
        """Rows of an argument, by place where they do not follow each other, from a column on."""
        where, run = self.tables.arg_column(self.b, index)
        if run or self.tables.is_one(self.b, index):
            self.viewed += where.size * width
            return rows_at(int(where[0]) + column, width if run else 0)
        return Rows(NULL, np.uint64(self.argument_column(index)), np.int64(column), np.int64(0))

    def argument_column(self, index: int) -> int:
        """Address of the places of an argument's rows."""
        return self._device_tables.table + 8 * (self._args + index * self.rows)

    def elements(self, index: int, column: int, width: int) -> Rows:
        """The same of the elements of a list."""
        _, where, run = self.tables.list_segments(self.b, index)
        if run and where.size:
            self.viewed += where.size * width
            return rows_at(int(where[0]) + column, width)
        return Rows(NULL, np.uint64(self.element_column(index)), np.int64(column), np.int64(0))

    def element_column(self, index: int) -> int:
        """Address of the places of a list's elements."""
        return self.boundaries(index) + 8 * (self.rows + 1)

    def boundaries(self, index: int) -> int:
        """Address of where each row's elements of a list begin and end."""
        at = self._lists
        for k in range(index):
            at += self.rows + 1 + self.tables.elements(self.b, k)
        return self._device_tables.table + 8 * at

    def integer_column(self, index: int) -> int:
        """Address of an integer payload column."""
        return self._device_tables.table + 8 * (self._ints + index * self.rows)

    def float_column(self, index: int) -> int:
        """Address of a float payload column, in the precision of the values."""
        return self._device_tables.reals + self.arena.itemsize * (self._floats + index * self.rows)

    def data_rows(self, index: int, width: int) -> int:
        """Location of the values given by the user for these rows, which go up with the tables."""
        where = self.tables.int_column(self.b, index)
        return self.arena.uploads.put_data(self.data, where, width) // self.arena.itemsize

    # ---- gradients --------------------------------------------------------------------------------------------------

    def kept(self, v: int) -> int:
        """Location of forward value ``v`` of these rows, which follow each other (gradients only)."""
        raise NotImplementedError

    def pull(self, v: int, output: int, width: int) -> int:
        """Location of the gradient of an output, for gradient value ``v`` (gradients only)."""
        raise NotImplementedError


class DeviceBackwardJob(DeviceJob):
    """A batch of a backward plan, as `dynbatch.cpu.job.BackwardJob` is for the CPU."""

    pools: Pools
    nodes_row: np.ndarray
    run: bool
    first: np.ndarray
    edges: Edges

    def kept(self, v: int) -> int:
        """A place in the pool where the rows follow each other there, else a gathered copy."""
        width = self.pools.code.width(v)
        place = self.pools.place(v, int(self.nodes_row[0]), self.rows) if self.run else -1
        if place >= 0:
            return place
        location = self.arena.scratch(self.rows * width)
        offsets = self.arena.uploads.put(self.pools.locate(v, self.nodes_row))
        source = Rows(NULL, np.uint64(offsets), np.int64(0), np.int64(0))
        self.copy(source, self.rows, width, location, width)
        self.gathered += self.rows * width
        return location

    def pull(self, v: int, output: int, width: int) -> int:
        """The sum of what the output's consumers left on their edges; one edge each, in a run, is not copied."""
        e = self.edges
        count, start = count_edges(self.first, output, e.ptr, e.edges, e.location, width)
        destination = self.destination.get(v, -1)
        if start >= 0 and destination < 0:
            return start
        boundaries, places = np.empty(self.rows + 1, np.int64), np.empty(count, np.int64)
        list_edges(self.first, output, e.ptr, e.edges, e.location, boundaries, places)
        if destination < 0:
            destination = self.arena.scratch(self.rows * width)
        launch = teams(self.rows, width, vector(self.kernels.dtype))
        uploads = self.arena.uploads
        self.launch(
            "sum_edges", launch, np.int64(self.rows), np.int32(width), np.int64(destination),
            np.uint64(uploads.put(boundaries)), np.uint64(uploads.put(places)),
        )  # fmt: skip
        return destination
