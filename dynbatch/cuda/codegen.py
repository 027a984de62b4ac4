"""CUDA C of one kernel for a fused region, from the same building blocks as the CPU's kernels.

A team of threads computes a row: as many as its width has use for, a power of two, part of a warp or a block. Each
thread goes over the row in steps of 16 bytes, loads what lies there of each operand at once, computes all outputs in
registers and stores them. Reductions within a row come before that, each depth of them (a softmax has two) in a pass
of its own, in which everything is computed anew from the operands: those lie in the caches by then, and what kernels
like these wait for is memory. The passes' order of additions follows from the width alone, so what a row gives does
not depend on others, nor on where it lies. Nothing about sizes is in the source.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dynbatch.compiler.fuse_elementwise import Region
from dynbatch.compiler.ir import ROW, Program
from dynbatch.compiler.kernel_body import COLUMN, COLUMNS, FULL, SCALAR, KernelBody, Operand, Reach, Terms
from dynbatch.cuda.launches import LARGEST_TEAM, Launch, teams, vector
from dynbatch.ops.elementwise import broadcast_to, constant
from dynbatch.ops.reduction import Reduction
from dynbatch.ops.segment import SegmentReduction, segment_length

_MOST_ARRAYS = 24
"""Operands and outputs of which a thread holds 16 bytes each; with more it would run out of registers."""


class KernelSource(NamedTuple):
    """A kernel: its text, what it reads and what it writes (value ids), the sizes that it takes, and what it counts.

    Its arguments are the memory, the number of rows, the sizes, ``numbers`` more integers, and the arrays. The
    integers are, for each operand in turn, place and stride (``affine``), a column (``index``), or the number of rows
    that list elements are of (``boundaries``, in a kernel over list elements); place and stride of each output; and
    the place of ``scratch`` elements a row, if it needs any.

    Attributes:
        domain: whose rows are counted.
        vector: how many elements a thread takes at a time.
    """

    text: str
    operands: tuple[Operand, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    domain: int
    vector: int
    scratch: int

    def launch(self, rows: int) -> Launch:
        """Blocks and threads for so many rows; at least one."""
        return teams(rows, max(self.sizes), self.vector)


def generate(program: Program, region: Region, dtype: str, gathered: bool = False) -> KernelSource:
    """The kernel of a region; its text goes behind that of ``kernels/common.cuh``.

    Arguments:
        gathered: rows of every operand have been brought together before.
    """
    return _Generator(program, region, dtype, gathered).source()


class _Read(NamedTuple):
    """How a kernel finds an operand; ``inside`` of a loop over a row's list elements, or once a row."""

    place: int
    operand: Operand
    inside: bool
    integers: int

    @property
    def name(self) -> str:
        return f"{'x' if self.operand.kind == 'boundaries' else 'a'}{self.place}"

    @property
    def argument(self) -> str:
        return f"const {'real' if self.operand.kind in ('shared', 'column') else 'integer'}* x{self.place}"

    @property
    def line(self) -> str:
        k, row, kind = self.place, "e" if self.inside else "r", self.operand.kind
        if kind == "integer":
            return f"const integer a{k} = x{k}[{row}];"
        if kind == "column":
            return f"const real a{k} = x{k}[{row}];"
        at = {
            "shared": f"x{k}",
            "index": f"mem + x{k}[{row}] + p{self.integers}",
            "affine": f"mem + p{self.integers} + {row} * p{self.integers + 1}",
        }[kind]
        return f"const real a{k} = *({at});" if self.operand.scalar else f"const real* const a{k} = {at};"


class _Generator(KernelBody):
    """Writes one kernel.

    Attributes:
        gathered: as `generate` is given it.
        by_element: whether its rows are list elements that also read what their node's row has.
        reads: operands, in the order in which they were met.
        integers: how many of those arguments have been given out.
        joins: by formula, the name of what joins two numbers in a reduction.
        shifted: how many scopes there are for single elements.
        reductions: within a row, but for those of one element.
        kept: reductions with more than one result a row, which lie in scratch memory.
        row: what each thread of a team computes once a row.
    """

    def __init__(self, program: Program, region: Region, dtype: str, gathered: bool) -> None:
        super().__init__(program, region)
        self.gathered = gathered
        self.by_element = self.grouped and self.domain > ROW
        self.reads: list[_Read] = []
        self.integers = 0
        self.joins: dict[str, str] = {}
        self.shifted = 0
        self.reductions = [i for i, x in enumerate(self.values) if isinstance(x.op, Reduction) and self.alias[i] == i]
        self.kept = [i for i in self.reductions if self.reach(i) != SCALAR]
        walks_lists = any(isinstance(x.op, SegmentReduction) and x.op is not segment_length for x in self.values)
        arrays = sum(self.reach(i) != SCALAR for i in (*self.body.outer, *self.sinks))
        self.vector = 1 if walks_lists or arrays > _MOST_ARRAYS else vector(dtype)
        self.row = _Scope(self)
        if self.by_element:
            # comes first, since the row of an element follows from it
            self.operand(next(i for i in self.body.outer if self.body.is_boundaries(i)))

    # ---- text -------------------------------------------------------------------------------------------------------

    def source(self) -> KernelSource:
        for passed in self._passes():
            self._reduce(passed)
        for reach in (SCALAR, COLUMN, COLUMNS, FULL):
            written = [(i, k) for i, outputs in self.sinks.items() if self.reach(i) == reach for k in outputs]
            if written:
                self._write(written, reach)
        head = self._head()
        arguments = ["real* mem", "integer rows", *(f"int {s}" for s in ("w", "n")[: len(self.sizes)])]
        arguments += [f"integer p{i}" for i in range(self.integers)]
        arguments += [read.argument for read in self.reads if read.operand.kind != "affine"]
        lines = []
        for text, name in self.joins.items():
            join = f"static __device__ real join(real x, real y) {{ return {text}; }}"
            lines += [f"struct {name} {{", f"    {join}", "};"]
        lines.append(
            f'extern "C" __global__ void __launch_bounds__({LARGEST_TEAM}, 1) kernel({", ".join(arguments)}) {{'
        )
        lines += [*_indented([*head, *self.row.lines]), "}", ""]
        operands = tuple(read.operand for read in self.reads)
        scratch = sum(self._size(i) for i in self.kept)
        text = "\n".join(lines)
        return KernelSource(text, operands, self.outputs, self.sizes, self.domain, self.vector, scratch)

    def _head(self) -> list[str]:
        """What finds the row, and its operands, outputs and scratch memory."""
        row = "e" if self.by_element else "r"
        lines = [
            f"constexpr int V = {self.vector};",
            "const int lane = threadIdx.x, step = V * blockDim.x;",
            f"const integer {row} = integer(blockIdx.x) * blockDim.y + threadIdx.y;",
            f"if ({row} >= rows) return;",
        ]
        for read in self.reads:
            if read.operand.kind != "boundaries":
                if self.by_element or not read.inside:
                    lines.append(read.line)
            elif self.by_element:
                lines.append(f"const integer r = row_of_element({read.name}, p{read.integers}, e);")
        for k in range(len(self.outputs)):
            lines.append(f"real* const o{k} = mem + p{self.integers} + {row} * p{self.integers + 1};")
            self.integers += 2
        if self.kept:
            before = ""
            row_size = " + ".join(self.span(self.reach(i)) for i in self.kept)
            for i in self.kept:
                lines.append(f"real* const q{i} = mem + p{self.integers} + {row} * ({row_size}){before};")
                before += f" + {self.span(self.reach(i))}"
            self.integers += 1
        return lines

    def _passes(self) -> list[list[int]]:
        """Reductions that one pass over a row computes: of values that the same loops go over, and of one depth."""
        depths: list[int] = []
        for i, value in enumerate(self.values):
            depths.append(max((depths[a] for a in value.args), default=0) + (i in self.reductions))
        passes: dict[tuple[int, Reach, Reach], list[int]] = {}
        for i in self.reductions:
            passes.setdefault((depths[i], self.reach(self.values[i].args[0]), self.reach(i)), []).append(i)
        return [passes[key] for key in sorted(passes)]

    def _reduce(self, passed: list[int]) -> None:
        """One pass for these reductions; their results are variables ``s3`` or rows ``q3`` in scratch memory."""
        loop, reach = self.reach(self.values[passed[0]].args[0]), self.reach(passed[0])
        joined = {i: self._join(i) for i in passed}
        count = {(FULL, COLUMNS): "w", (FULL, COLUMN): "n"}.get((loop, reach), self.span(loop))
        start = [f"real s{i} = {literal(self._op(i).initial)};" for i in passed]
        final = {i: formula(self._op(i).final, {"x": f"s{i}", "n": f"real({count})"}) for i in passed}

        def step(scope: _Scope) -> None:
            for i in passed:
                term = scope.term(self.values[i].args[0])
                scope.lines.append(f"s{i} = {joined[i]}::join(s{i}, {term});")

        def finish(i: int) -> list[str]:
            whole = f"s{i} = team_reduce<{joined[i]}>(s{i});"
            return [whole] if final[i] == f"s{i}" else [whole, f"s{i} = {final[i]};"]

        if reach == SCALAR:
            lines = self._loop(loop, step)
            self.row.lines += [*start, *lines, *(line for i in passed for line in finish(i))]
            return
        if reach == COLUMNS:
            after = [line for i in passed for line in (*finish(i), f"if (lane == 0) q{i}[c] = s{i};")]
            lines = self._loop(FULL, step, start, after)
        else:

            def columns(scope: _Scope) -> None:
                inner = _Scope(self, scope, c="c")
                step(inner)
                scope.lines += [*start, "for (int c = 0; c < n; ++c) {", *_indented(inner.lines), "}"]
                scope.stores += [(f"q{i}", final[i]) for i in passed]

            lines = self._loop(COLUMN, columns)
        self.row.lines += [*lines, "team_sync();"]

    def _write(self, written: list[tuple[int, int]], reach: Reach) -> None:
        """Compute values of one reach, and write them to outputs."""
        if reach == SCALAR:
            terms = [(k, self.row.term(i)) for i, k in written]
            self.row.lines += ["if (lane == 0) {", *(f"    *o{k} = {term};" for k, term in terms), "}"]
            return

        def fill(scope: _Scope) -> None:
            scope.stores += [(f"o{k}", scope.term(i)) for i, k in written]

        self.row.lines += self._loop(reach, fill)

    def _loop(
        self, reach: Reach, fill: Callable[[_Scope], None], start: Sequence[str] = (), after: Sequence[str] = ()
    ) -> list[str]:
        """The team's loop over what has this reach; over columns around one, ``start`` and ``after`` once in each."""
        if reach != FULL:
            return self._steps(_Scope(self, self.row, **{"c" if reach == COLUMNS else "j": None}), fill)
        column = _Scope(self, self.row, c="c")
        inner = self._steps(_Scope(self, column, j=None), fill)
        return ["for (int c = 0; c < n; ++c) {", *_indented([*column.lines, *start, *inner, *after]), "}"]

    def _steps(self, scope: _Scope, fill: Callable[[_Scope], None]) -> list[str]:
        """The loop of a thread over its steps along a column, or along columns, and in each over its elements."""
        fill(scope)
        x, size = scope.loop, "w" if scope.loop == "j" else "n"
        names = [f"y{m}" for m in range(len(scope.stores))]
        elements = [*scope.lines, *(f"{name}[k] = {term};" for name, (_, term) in zip(names, scope.stores))]
        return [
            f"for (int {x}0 = V * lane; {x}0 < {size}; {x}0 += step) {{",
            f"    const int left = {size} - {x}0;",
            *_indented(scope.loads),
            *(f"    real {name}[V];" for name in names),
            "    #pragma unroll",
            "    for (int k = 0; k < V; ++k) if (k < left) {",
            *([f"        const int {x} = {x}0 + k;"] if any(re.search(rf"\b{x}\b", e) for e in elements) else []),
            *_indented(_indented(elements)),
            "    }",
            *(f"    store({to} + {scope.base}, {name}, left);" for name, (to, _) in zip(names, scope.stores)),
            "}",
        ]

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _size(self, i: int) -> int:
        width, columns = self.body.extents(i)
        return width * columns

    def _op(self, i: int) -> Any:
        return self.values[i].op

    def _join(self, i: int) -> str:
        text = formula(self._op(i).formula, {"x": "x", "y": "y"})
        return self.joins.setdefault(text, f"Join{len(self.joins)}")

    def operand_of(self, i: int) -> Operand:
        """See `KernelBody.operand_of`."""
        operand = super().operand_of(i)
        return operand._replace(kind="affine") if self.gathered and operand.kind == "index" else operand

    def operand(self, i: int) -> _Read:
        """How an input is read."""
        operand = self.operand_of(i)
        for read in self.reads:
            if read.operand == operand:
                return read
        read = _Read(len(self.reads), operand, self.is_inside(i), self.integers)
        counted = int(operand.kind == "boundaries" and self.by_element)
        self.integers += {"affine": 2, "index": 1}.get(operand.kind, counted)
        self.reads.append(read)
        return read


class _Scope(Terms["_Generator"]):
    """Where statements stand, and what they are about: an element along a column ``j``, a column ``c``, a list element.

    A value is computed in the outermost scope that it does not vary within, once.

    Attributes:
        sets: which of ``j``, ``c`` and ``e`` are set here, and not by an outer scope.
        loop: the one over which the loop of `_Generator._steps` goes here, if it does.
        places: texts of ``j`` and ``c``.
        lines: statements.
        loads: what that loop loads at the beginning of each step.
        stores: what it stores at the end of each: where rows begin, and terms.
    """

    def __init__(self, generator: _Generator, outer: _Scope | None = None, **places: str | None) -> None:
        self.generator = generator
        self.outer = outer
        self.sets = set(places)
        self.loop = next((axis for axis, text in places.items() if text is None), "")
        inherited: dict[str, str] = outer.places if outer else {}
        self.places: dict[str, str] = inherited | {axis: text or axis for axis, text in places.items()}
        self.lines: list[str] = []
        self.loads: list[str] = []
        self.stores: list[tuple[str, str]] = []
        self.suffix = ""
        self._done: dict[tuple[int, Reach], str] = {}

    @property
    def base(self) -> str:
        """Where a step begins in a row that the loop goes over."""
        return "c * w + j0" if self.loop == "j" and "c" in self.places else f"{self.loop}0"

    def term(self, i: int) -> str:
        """The text that stands for value ``i`` here; statements that it needs are added."""
        g = self.generator
        at, reach = g.alias[i], g.reach(i)
        if self.outer and not self._varies(at, reach):
            return self.outer.term(i)
        if (at, reach) not in self._done:
            self._done[at, reach] = self._make(at, reach)
        return self._done[at, reach]

    def _varies(self, i: int, reach: Reach) -> bool:
        inside = self.generator.is_inside(i) and "e" in self.sets
        return inside or (reach[0] and "j" in self.sets) or (reach[1] and "c" in self.sets)

    def _make(self, i: int, reach: Reach) -> str:
        """The term of a value, seen with this reach: a reshape may have another than what it reshapes."""
        g = self.generator
        value = g.values[i]
        if value.op is None:
            read = g.operand(i)
            if read.inside and not g.by_element and read.line not in self.lines:
                self.lines.append(read.line)
            return read.name if g.reach(i) == SCALAR else self._read(read.name, reach)
        if value.op is constant:
            return literal(dict(value.attrs)["value"])
        if i in g.reductions:
            return f"s{i}" if g.reach(i) == SCALAR else self._read(f"q{i}", reach)
        if g.reach(i) != reach:
            return self._elsewhere(i, self.place(reach))
        if isinstance(value.op, SegmentReduction):
            return self._reduce_segment(i, value.op)
        text = self.compute(i)
        if value.op is broadcast_to:
            return text
        self.lines.append(f"const real v{i}{self.suffix} = {text};")
        return f"v{i}{self.suffix}"

    def place(self, reach: Reach) -> str:
        """See `Terms.place`."""
        j, c = (self.places.get(axis, "0") for axis in "jc")
        return {SCALAR: "0", COLUMN: j, COLUMNS: c, FULL: f"({c} * w + {j})"}[reach]

    def _read(self, name: str, reach: Reach) -> str:
        """An element of an array, which the loop loads with its neighbours if they follow each other."""
        if not (self.loop and reach["jc".index(self.loop)]):
            return f"{name}[{self.place(reach)}]"
        loaded = f"{name}_{'full' if reach == FULL else self.loop}"
        base = self.base if reach == FULL else f"{self.loop}0"
        lines = [f"real {loaded}[V];", f"load({loaded}, {name} + {base}, left);"]
        if lines[0] not in self.loads:
            self.loads += lines
        return f"{loaded}[k]"

    def _elsewhere(self, i: int, place: str) -> str:
        """Value ``i`` at another place of its row."""
        g = self.generator
        axis = {COLUMN: "j", COLUMNS: "c"}[g.reach(i)]
        scope = _Scope(g, self, **{axis: place})
        scope.lines = self.lines
        g.shifted += 1
        scope.suffix = f"_{g.shifted}"
        return scope.term(i)

    def _reduce_segment(self, i: int, op: SegmentReduction) -> str:
        g = self.generator
        x, name = g.operand(g.values[i].args[-1]).name, f"s{i}{self.suffix}"
        if op is segment_length:
            return f"real({x}[r + 1] - {x}[r])"
        inner = _Scope(g, self, e="e")
        step = formula(op.formula, {"x": name, "y": inner.term(g.values[i].args[0])})
        self.lines += [
            f"real {name} = {literal(op.initial)};",
            f"for (integer e = {x}[r]; e < {x}[r + 1]; ++e) {{",
            *_indented([*inner.lines, f"{name} = {step};"]),
            "}",
        ]
        return name

    def element(self, x: int, index: int) -> str:
        """See `Terms.element`."""
        if self.generator.reach(x) == SCALAR:
            return self.term(x)
        return self._elsewhere(x, f"int({self.term(index)})")

    def formula(self, text: str, names: dict[str, str]) -> str:
        """See `Terms.formula`."""
        return formula(text, names)

    def literal(self, number: float) -> str:
        """See `Terms.literal`."""
        return literal(number)

    def real(self, text: str) -> str:
        """See `Terms.real`."""
        return f"real({text})"

    def index(self, axis: str) -> str:
        """See `Terms.index`."""
        return self.places[axis]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def literal(number: float) -> str:
    """A number of the kernel's precision."""
    if math.isinf(number):
        return "infinity()" if number > 0 else "-infinity()"
    return f"real({number!r})"


def formula(text: str, names: dict[str, str]) -> str:
    """A formula in C, with texts for its names."""
    return _c(ast.parse(text, mode="eval").body, names)


_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.USub: "-",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==",
}  # fmt: skip


def _c(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return "infinity()" if node.id == "inf" else names[node.id]
    if isinstance(node, ast.Constant):
        return literal(float(node.value))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp):
        return f"({_OPERATORS[type(node.op)]}{_c(node.operand, names)})"
    if isinstance(node, ast.BinOp):
        return f"({_c(node.left, names)} {_OPERATORS[type(node.op)]} {_c(node.right, names)})"
    if isinstance(node, ast.Compare):
        return f"({_c(node.left, names)} {_OPERATORS[type(node.ops[0])]} {_c(node.comparators[0], names)})"
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    args = [_c(a, names) for a in node.args]
    if node.func.id == "where":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    return f"math::{node.func.id}({', '.join(args)})"
