"""What a kernel for a fused region is made of, before it has a text: values, their reach, operands and outputs.

The generators of both backends derive from it (`dynbatch.cpu.codegen`, `dynbatch.cuda.codegen`).
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from dynbatch.compiler.fuse_elementwise import Region
from dynbatch.compiler.ir import ROW, SHARED, Program
from dynbatch.compiler.lower import lower
from dynbatch.ops.elementwise import broadcast_to, to_float
from dynbatch.ops.indexing import element
from dynbatch.ops.primitive import Elementwise, Indexed
from dynbatch.ops.reduction import Reduction
from dynbatch.ops.segment import expand
from dynbatch.ops.shape import pick_range, reshape


class Operand(NamedTuple):
    """Something from outside that a kernel reads: a value, and the column where the part that is used starts.

    ``kind`` is ``index`` (rows scattered over the arena), ``affine`` (rows at equal distances), ``column`` (a number
    a row in an array of its own), ``integer`` (the same of integers), ``boundaries`` (where each row's list elements
    begin and end) or ``shared`` (one array for all rows). A ``scalar`` is read as one number a row.
    """

    value: int
    column: int
    kind: str
    scalar: bool


Reach = tuple[bool, bool]
"""Whether a value has several elements along a column, and several columns: also a nest of loops."""

SCALAR: Reach = (False, False)
COLUMN: Reach = (True, False)
COLUMNS: Reach = (False, True)
FULL: Reach = (True, True)


def resolve(program: Program, v: int, shared: bool = False) -> tuple[int, int]:
    """The value in whose memory ``v`` lies, and at which column: reshapes, and slices of vectors, copy nothing.

    What all rows share is not resolved, but where that is asked for.
    """
    column = 0
    while True:
        value = program.values[v]
        if (value.domain == SHARED and not shared) or value.op not in (reshape, pick_range):
            return v, column
        source = program.values[value.args[0]].type
        assert source is not None
        if value.op is pick_range:
            if len(source.shape) > 1:
                return v, column
            column += dict(value.attrs)["start"]
        v = value.args[0]


class KernelBody:
    """What one kernel computes.

    Attributes:
        body: it, in building blocks.
        values: those of the body.
        flat: whether every value has one element or all, so that one loop over a row's elements does.
        sizes: what loops run over: the elements of a row if it is flat, else those of a column, and the columns.
        alias: for each value, the one in whose place it lies: itself, but for reshapes.
        outputs: value ids, in the Program, of what is written.
        sinks: for each value that the outside reads, which of the outputs it is.
        domain: whose rows the region runs over.
        grouped: whether it reads where each row's list elements begin and end.
    """

    def __init__(self, program: Program, region: Region) -> None:
        self.program = program
        self.body = lower(program, region.members)
        self.values = self.body.values
        extents = [self.body.extents(i) for i, x in enumerate(self.values) if x.op is not reshape]
        self.flat = all(e in ((1, 1), region.extents) for e in extents)
        width, columns = region.extents
        self.sizes = (width * columns,) if self.flat else (width, columns)
        self.alias = self._find_aliases()
        self.outputs = tuple(v for v in region.members if v in region.outside)
        self.sinks: dict[int, list[int]] = {}
        for k, v in enumerate(self.outputs):
            self.sinks.setdefault(self.alias[self.body.inner[v]], []).append(k)
        self.domain = region.domain
        self.grouped = any(self.body.is_boundaries(i) for i in self.body.outer)

    def reach(self, i: int) -> Reach:
        """Along which of the loops value ``i`` varies."""
        width, columns = self.body.extents(i)
        return (width * columns > 1, False) if self.flat else (width > 1, columns > 1)

    def span(self, reach: Reach) -> str:
        """Text of the number of elements of a value."""
        return {SCALAR: "1", COLUMN: "w", COLUMNS: "n", FULL: "w * n"}[reach]

    def _find_aliases(self) -> list[int]:
        """Reshapes, what neither stretches nor reduces, and values of a row that its list elements read."""
        found: list[int] = []
        for i, value in enumerate(self.values):
            same = bool(value.args) and self.reach(i) == self.reach(value.args[0])
            idle = same and (value.op is broadcast_to or isinstance(value.op, Reduction))
            found.append(found[value.args[0]] if idle or value.op in (reshape, expand) else i)
        return found

    def is_inside(self, i: int) -> bool:
        """Whether value ``i`` belongs to a list element, in a kernel that goes over the elements of rows."""
        return self.grouped and self.values[i].domain > ROW

    def operand_of(self, i: int) -> Operand:
        """How input ``i`` is read."""
        v = self.body.outer[i]
        value = self.program.values[v]
        scalar = self.reach(i) == SCALAR
        source, column = resolve(self.program, v)
        kind = self.program.values[source].kind
        if value.kind == "ptr":
            return Operand(v, 0, "boundaries", False)
        if value.type is None:
            return Operand(v, 0, "integer", True)
        if value.domain == SHARED:
            return Operand(v, 0, "shared", scalar)
        if kind in ("arg", "list"):
            return Operand(source, column, "index", scalar)
        if kind == "float":
            return Operand(source, 0, "column", True)
        return Operand(source, column, "affine", scalar)


Body = TypeVar("Body", bound=KernelBody)


class Terms(Generic[Body]):
    """What a value that is computed from others looks like in a kernel; its words are a language's, in subclasses.

    Attributes:
        generator: whose values they are.
    """

    generator: Body

    def compute(self, i: int) -> str:
        """The text that computes value ``i`` from the terms of its operands."""
        value = self.generator.values[i]
        op, attrs = value.op, dict(value.attrs)
        if op is element:
            return self.element(*value.args)
        terms = [self.term(a) for a in value.args]
        if op is broadcast_to:
            return terms[0]
        if op is to_float:
            return self.real(terms[0])
        if isinstance(op, Indexed):
            reach = self.generator.reach(i)
            names = dict(zip("x", terms)) | {"i": self.place(reach), "size": self.generator.span(reach)}
            names["along"] = self._along(i, attrs)
            return self.formula(op.formula, names | {name: repr(a) for name, a in attrs.items()})
        assert isinstance(op, Elementwise)
        return self.formula(op.formula, dict(zip(op.operands, terms)))

    def _along(self, i: int, attrs: dict[str, Any]) -> str:
        """The place of an element along dimension ``dim``."""
        type, dim = self.generator.values[i].type, attrs.get("dim", 0)
        assert type is not None
        if type.shape[dim] == 1:
            return self.literal(0.0)
        return self.real(self.index("c" if dim and not self.generator.flat else "j"))

    def term(self, i: int) -> str:
        """The text that stands for value ``i``; statements that it needs are added."""
        raise NotImplementedError

    def element(self, x: int, index: int) -> str:
        """The element of value ``x`` at the place that value ``index`` holds."""
        raise NotImplementedError

    def formula(self, text: str, names: dict[str, str]) -> str:
        """A formula with texts for its names."""
        raise NotImplementedError

    def literal(self, number: float) -> str:
        """A number of the kernel's precision."""
        raise NotImplementedError

    def real(self, text: str) -> str:
        """An integer as a number of the kernel's precision."""
        raise NotImplementedError

    def index(self, axis: str) -> str:
        """The place along a column, ``j``, or the column's, ``c``."""
        raise NotImplementedError

    def place(self, reach: Reach) -> str:
        """The place in storage order."""
        raise NotImplementedError
