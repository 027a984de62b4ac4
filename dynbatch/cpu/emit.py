"""The compiled tier: a Program's batch as one generated Python function that calls kernels and products.

What a batch costs in Python is paid some hundred times a minibatch, so nothing is looked up while it runs: the
function has its operands in local variables, scratch space is one block, slices and reshapes are offsets, the parts of
a concatenation are written in place, and arguments are gathered by the kernels that read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import ROW, SHARED
from dynbatch.cpu import products
from dynbatch.cpu.codegen import generate, resolve
from dynbatch.cpu.gather import gather, gather_from
from dynbatch.cpu.job import Job
from dynbatch.cpu.kernels import call_first, is_compiled
from dynbatch.cpu.routine import Routine, is_vector_concatenation
from dynbatch.ops.linear import matmul

_SCATTERED = ("arg", "list")


class CompiledRoutine(Routine):
    """A Routine whose batches run as generated code, written when the first one comes; see the module.

    Attributes:
        source: the generated code.
        prepared: what it needs of parameters: values, and the forms it uses them in.
    """

    tier = "compiled"

    source = ""
    prepared: Sequence[tuple[int, str]] = ()
    _function: Any = None

    def run(self, job: Job) -> None:
        """Run one batch."""
        if self._function is None:
            emitter = _Emitter(self)
            missing = sum(not is_compiled(s.text) for s in emitter.sources.values())
            if missing:
                kernels = "1 kernel" if missing == 1 else f"{missing} kernels"
                print(f"dynbatch: compiling {kernels} of {self.program.name}, kept for next time", file=sys.stderr)
            self.prepared = emitter.prepared
            self.source = emitter.text()
            exec(compile(self.source, f"<{self.program.name}>", "exec"), emitter.namespace)
            self._function = emitter.namespace["run"]
        self._function(job, self._shared_forms(job))

    def _shared_forms(self, job: Job) -> tuple[Any, ...]:
        """What the function needs of parameters, each in the form that it is used in; made once a version."""
        if not self.prepared:
            return ()
        signature = job.signature
        version = signature.version()
        known = signature.cache.get((self, "forms"))
        if known is None or known[0] != version:
            values = self.shared_arrays(signature, job.arena)
            forms = tuple([_FORMS[form](values[v]) for v, form in self.prepared])
            known = signature.cache[self, "forms"] = (version, forms)
        return known[1]


_FORMS: dict[str, Any] = {
    "array": lambda x: x,
    "flat": lambda x: np.ascontiguousarray(x).reshape(-1),
    "matrix": lambda x: x[0],
    "transposed": lambda x: x[0].T,
    "packed": lambda x: products.packed(x[0]),
    "packed transposed": lambda x: products.packed(x[0].T),
}


class _Emitter:
    """Writes the function of one routine."""

    def __init__(self, routine: CompiledRoutine) -> None:
        self.routine = routine
        self.program = program = routine.program
        self.values = program.values
        self.stored = routine.stored
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {"ndarray": np.ndarray, "gather": gather, "gather_from": gather_from}
        self.prepared: list[tuple[int, str]] = []
        self.home = [(v, 0) for v in range(len(self.values))]
        self.stride = [v.type.size if v.type else 1 for v in self.values]
        self.part_of: dict[int, tuple[int, int]] = {}
        self.located: set[int] = set()
        self.arrays: set[int] = set()
        self.indexed: set[int] = set()
        self.counted: set[int] = set()
        self.scratch: list[tuple[int, int, int]] = []  # (value, domain, width)
        skip = routine.late | {v for v, x in enumerate(self.values) if x.op is not None and x.domain == SHARED}
        self.schedule = fuse_elementwise(program, skip, self.stored)
        self.dtype = next((x.type.dtype.name for x in self.values if x.type is not None), "float32")
        self.sources = {
            id(item): generate(program, item, self.dtype) for item in self.schedule if isinstance(item, Region)
        }
        self._plan_memory(skip)

    def _size(self, v: int) -> int:
        type = self.values[v].type
        assert type is not None
        return type.size

    def _plan_memory(self, skip: frozenset[int] | set[int]) -> None:
        """What is an alias, what is written into a concatenation, and what needs rows in the arena."""
        values, late_home = self.values, self.routine.late_home
        written = {v for item in self.schedule if isinstance(item, Region) for v in item.outside}
        for v, value in enumerate(values):
            if v in skip or value.op is None:
                continue
            if v not in self.stored:
                self.home[v] = resolve(self.program, v)
            if is_vector_concatenation(self.program, v):
                column = 0
                for a in value.args:
                    fits = (a in written or values[a].op is matmul) and a not in self.stored
                    elsewhere = late_home.get(a, (v, column)) != (v, column)
                    if fits and not elsewhere and a not in self.part_of and values[a].domain == value.domain:
                        self.part_of[a] = (v, column)
                        self.stride[a] = self._size(v)
                    column += self._size(a)
        spaced = set(written)
        for source in self.sources.values():
            spaced |= {o.value for o in source.operands if o.kind == "affine"}
        for v, value in enumerate(values):
            if v not in skip and (value.op is matmul or is_vector_concatenation(self.program, v)):
                spaced.add(v)
            if v not in skip and self._is_weight_product(v):
                spaced.add(self.home[value.args[1]][0])
        spaced |= set(self.part_of)
        self.spaced = {v for v in spaced if values[v].op is not None and v not in skip and self.home[v][0] == v}
        for v in sorted(self.spaced):
            if v not in self.stored and v not in self.part_of:
                self.scratch.append((v, values[v].domain, self._size(v)))

    # ---- text -------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The source of the function."""
        for v, value in enumerate(self.values):
            if value.kind == "dout" and v in self.stored:
                self._location(v)  # pulled to where it is stored, though nothing here may read it
            elif value.op is None and v in self.stored:
                self._store(v)
        for item in self.schedule:
            if isinstance(item, Region):
                self._kernel(item)
            elif self.home[item][0] == item:
                if is_vector_concatenation(self.program, item):
                    self._concatenation(item)
                else:
                    self._op(item)
        for v, value in enumerate(self.values):
            if v in self.stored and value.op is not None and value.domain == SHARED and v not in self.routine.late:
                self._store(v)
        head = ["def run(job, shared):", "    arena, tables, b, rows = job.arena, job.tables, job.b, job.rows"]
        head += [
            "    mem, address, destination = arena.mem, arena.address, job.destination",
            "    n1, gathered, viewed = 1, 0, 0",
        ]
        if self.prepared:
            head.append(f"    {''.join(f's{i}, ' for i in range(len(self.prepared)))}= shared")
        used = {domain for _, domain, _ in self.scratch} | {self.values[v].domain for v in self.located}
        body = [
            *self._scratch_lines(used),
            *(f"    {line}" for line in self.lines),
            "    job.gathered += gathered",
            "    job.viewed += viewed",
        ]
        return "\n".join([*head, *body]) + "\n"

    def _scratch_lines(self, domains: set[int]) -> list[str]:
        lines = []
        for domain in sorted(d for d in domains | self.counted if d > ROW):
            k = next(k for k, g in self._groups().items() if g == domain)
            lines.append(f"    n{domain + 1} = tables.list_segments(b, {k})[1].size")
        if self.scratch:
            sizes = [f"(({self._count(domain)} * {width} + 15) & -16)" for _, domain, width in self.scratch]
            lines.append(f"    L{self.scratch[0][0]} = arena.scratch({' + '.join(sizes)})")
            for (v, _, _), (before, _, _), size in zip(self.scratch[1:], self.scratch, sizes):
                lines.append(f"    L{v} = L{before} + {size}")
        for v in sorted(self.stored):
            if self.values[v].domain >= ROW and self.values[v].kind != "dout" and self.values[v].op is not None:
                lines.append(f"    L{v} = destination[{v}]")
        for v, (owner, column) in sorted(self.part_of.items(), reverse=True):
            lines.append(f"    L{v} = L{owner} + {column}")
        return lines

    def _groups(self) -> dict[int, int]:
        return self.routine.groups

    def _count(self, domain: int) -> str:
        """Name of the length of a domain's leading axis."""
        if domain > ROW:
            self.counted.add(domain)
        return "rows" if domain == ROW else "1" if domain == SHARED else f"n{domain + 1}"

    def _add(self, line: str) -> None:
        self.lines.append(line)

    def _shared(self, v: int, form: str) -> str:
        key = (v, form)
        if key not in self.prepared:
            self.prepared.append(key)
        return f"s{self.prepared.index(key)}"

    def _is_shared(self, v: int) -> bool:
        return self.values[v].domain == SHARED

    def _index(self, v: int) -> str:
        """Name of the locations of a scattered argument's rows."""
        if v not in self.indexed:
            self.indexed.add(v)
            value = self.values[v]
            if value.kind == "arg":
                self._add(f"X{v}, C{v} = tables.arg_column(b, {value.index})")
            else:
                self._add(f"_, X{v}, C{v} = tables.list_segments(b, {value.index})")
        return f"X{v}"

    def _location(self, v: int) -> str:
        """Name of the location of a value's first row; its rows are at equal distances."""
        value = self.values[v]
        if v in self.located or v in self.spaced or (v in self.stored and value.op is not None):
            return f"L{v}"
        self.located.add(v)
        size = self._size(v)
        if value.kind in _SCATTERED:
            x = self._index(v)
            self._add(f"if C{v} and {x}.size:")
            self._add(f"    L{v} = int({x}[0])")
            self._add(f"    viewed += {x}.size * {size}")
            self._add("else:")
            self._add(f"    L{v} = arena.scratch({x}.size * {size})")
            self._add(f"    gather(mem, {x}, {size}, L{v}, {size})")
            self._add(f"    gathered += {x}.size * {size}")
        elif value.kind == "fwd":
            self._add(f"L{v} = job.kept({value.index})")
        elif value.kind == "dout":
            self._add(f"L{v} = job.pull({v}, {value.index}, {size})")
        elif value.kind == "data":
            self._add(f"L{v} = arena.scratch(rows * {size})")
            self._add(f"gather_from(job.data, tables.int_column(b, {value.index}), {size}, mem, L{v})")
        else:
            raise AssertionError(f"value {v} of {self.program.name} has no location")
        return f"L{v}"

    def _view(self, location: str, v: int, stride: int) -> str:
        """Text of an array of value ``v``'s rows at a location."""
        value = self.values[v]
        storage = value.type.storage  # type: ignore[union-attr]
        item = value.type.dtype.itemsize  # type: ignore[union-attr]
        count = self._count(value.domain)
        shape = f"({', '.join([count, *map(str, storage)])})"
        base = f"ndarray({shape}, mem.dtype, mem, ({location}) * {item}"
        if stride == self._size(v):
            return base + ")"
        strides = [item]
        for n in storage[:0:-1]:
            strides.insert(0, strides[0] * n)
        return f"{base}, ({stride * item}, {', '.join(map(str, strides))}))"

    def _array(self, v: int) -> str:
        """Name of a value's array, its domain as leading axis."""
        value = self.values[v]
        if self._is_shared(v):
            return self._shared(v, "array")
        name = f"A{v}"
        if v in self.arrays:
            return name
        self.arrays.add(v)
        source, column = self.home[v]
        if source != v and self._has_location(source):
            self._add(f"{name} = {self._view(f'{self._location(source)} + {column}', v, self.stride[source])}")
        elif source != v:
            storage = ", ".join(map(str, value.type.storage))  # type: ignore[union-attr]
            flat = f"{self._array(source)}.reshape(-1, {self._size(source)})"
            self._add(f"{name} = {flat}[:, {column}:{column + self._size(v)}].reshape(-1, {storage})")
        elif value.kind == "int":
            self._add(f"{name} = tables.int_column(b, {value.index})")
        elif value.kind == "float":
            self._add(f"{name} = tables.float_column(b, {value.index}).astype(mem.dtype)[:, None]")
        elif value.kind == "ptr":
            k = next(k for k, g in self._groups().items() if g == value.index)
            self._add(f"{name} = tables.list_segments(b, {k})[0]")
        else:
            self._add(f"{name} = {self._view(self._location(v), v, self.stride[v])}")
        return name

    def _array_or_one(self, v: int) -> str:
        """A value's array, with a leading axis of one where the whole batch has the same argument.

        A product with it is one GEMM for the batch, and nothing is gathered.
        """
        value = self.values[v]
        if value.kind != "arg" or v in self.located or v in self.arrays:
            return self._array(v)
        x, size = self._index(v), self._size(v)
        storage = ", ".join(map(str, value.type.storage))  # type: ignore[union-attr]
        item = value.type.dtype.itemsize  # type: ignore[union-attr]
        name = f"O{v}"
        self._add(f"if tables.is_one(b, {value.index}):")
        self._add(f"    {name} = ndarray((1, {storage}), mem.dtype, mem, int({x}[0]) * {item})")
        self._add(f"    viewed += rows * {size}")
        self._add("else:")
        before = len(self.lines)
        array = self._array(v)
        self.lines[before:] = [f"    {line}" for line in self.lines[before:]]
        self._add(f"    {name} = {array}")
        self.located.discard(v)  # what was set in a branch only may not be there
        self.arrays.discard(v)
        return name

    def _has_location(self, v: int) -> bool:
        value = self.values[v]
        if v in self.located or v in self.spaced or v in self.stored:
            return True
        return value.kind in (*_SCATTERED, "fwd", "dout", "data")

    def _store(self, v: int) -> None:
        """Store an input, or what the whole batch shares, once a row."""
        value = self.values[v]
        source = self._array(v)
        count = "rows" if value.domain == SHARED else self._count(value.domain)
        storage = ", ".join(map(str, value.type.storage))  # type: ignore[union-attr]
        item = value.type.dtype.itemsize  # type: ignore[union-attr]
        self._add(f"ndarray(({count}, {storage}), mem.dtype, mem, destination[{v}] * {item})[...] = {source}")

    def _op(self, v: int) -> None:
        """One instruction: a product, or the NumPy reference."""
        value = self.values[v]
        assert value.op is not None
        attrs = dict(value.attrs)
        in_arena = v in self.spaced or v in self.stored
        if self._is_weight_product(v):
            self._weight_product(v, bool(attrs.get("ta")))
            return
        if value.op is matmul and not self._is_shared(value.args[1]):
            right = self._array(value.args[1])  # has all rows, so that the product does
            operands = f"{self._array_or_one(value.args[0])}, {right}"
        else:
            operands = ", ".join(self._array(a) for a in value.args)
        name = f"op{v}"
        self.namespace[name] = partial(value.op.numpy, **attrs)
        if not in_arena:
            self.arrays.add(v)
            self._add(f"A{v} = {name}({operands})")
        elif value.op.writes_out:
            self._add(f"{name}({operands}, out={self._array(v)})")
        else:
            self._add(f"{self._array(v)}[...] = {name}({operands})")

    def _is_weight_product(self, v: int) -> bool:
        """Whether value ``v`` is a product of a shared matrix with a vector of each row: one GEMM for the batch."""
        value = self.values[v]
        if value.op is not matmul:
            return False
        weight, x = value.args
        attrs = dict(value.attrs)
        ranks = [len(self.values[a].type.shape) for a in (weight, x)]  # type: ignore[union-attr]
        fits = self._is_shared(weight) and not self._is_shared(x) and ranks == [2, 1]
        return fits and bool(attrs.get("vector")) and not attrs.get("tb")

    def _weight_product(self, v: int, transposed: bool) -> None:
        weight, x = self.values[v].args
        library = products.mkl() if self.dtype == "float32" else None
        if library is None:
            self.namespace["matmul"] = np.matmul
            matrix = self._shared(weight, "transposed" if transposed else "matrix")
            self._add(f"matmul({self._array(x)}, {matrix}, out={self._array(v)})")
            return
        self.namespace["compute"] = library.compute
        matrix = self._shared(weight, "packed transposed" if transposed else "packed")
        source, column = self.home[x]
        item = self.values[v].type.dtype.itemsize  # type: ignore[union-attr]
        x_at = f"address + ({self._location(source)} + {column}) * {item}"
        out_at = f"address + {self._location(v)} * {item}"
        count = self._count(self.values[v].domain)
        self._add(f"compute({matrix}, {count}, {x_at}, {self.stride[source]}, {out_at}, {self.stride[v]})")

    def _concatenation(self, v: int) -> None:
        width, column = self._size(v), 0
        for a in self.values[v].args:
            size = self._size(a)
            if self.part_of.get(a) != (v, column):
                source, inner = self.home[a]
                at = f"{self._location(v)} + {column}"
                if self.values[source].kind in _SCATTERED:
                    x = self._index(source)
                    self._add(f"gather(mem, {x}{f' + {inner}' if inner else ''}, {size}, {at}, {width})")
                    self._add(f"gathered += {x}.size * {size}")
                else:
                    array = self._array(a)
                    domain = self.values[v].domain
                    item = self.values[v].type.dtype.itemsize  # type: ignore[union-attr]
                    view = f"ndarray(({self._count(domain)}, {size}), mem.dtype, mem, ({at}) * {item}, "
                    self._add(f"{view}({width * item}, {item}))[...] = {array}")
            column += size

    def _first_call(self, name: str, text: str) -> Callable[..., None]:
        """Stands for a kernel until it was called once."""
        namespace = self.namespace

        def kernel(*args: Any) -> None:
            namespace[name] = call_first(text, args)

        return kernel

    def _kernel(self, region: Region) -> None:
        source = self.sources[id(region)]
        name = f"k{len([n for n in self.namespace if n.startswith('k')])}"
        self.namespace[name] = self._first_call(name, source.text)
        numbers: list[str] = []
        arrays: list[str] = []
        for value, column, kind, _ in source.operands:
            if kind == "affine":
                at = self._location(value)
                numbers += [f"{at} + {column}" if column else at, str(self.stride[value])]
            elif kind == "index":
                numbers.append(str(column))
                arrays.append(self._index(value))
            elif kind == "shared":
                arrays.append(self._shared(value, "flat"))
            elif kind in ("integer", "boundaries"):
                arrays.append(self._array(value))
            else:
                arrays.append(f"{self._array(value)}[:, 0]")
        for v in source.outputs:
            numbers += [self._location(v), str(self.stride[v])]
        call = ", ".join(["mem", "0", self._count(source.domain), *map(str, source.sizes), *numbers, *arrays])
        self._add(f"{name}({call})")
