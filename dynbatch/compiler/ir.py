"""The intermediate representation: a Program is a straight line of primitive ops over typed values.

Every value has a *domain*, which says how often it exists in a batch: once (`SHARED`, what depends on
parameters alone), once a node (`ROW`), or once an element of a node's list argument (1, 2, ...: a *segment*
domain, one per group of lists that are zipped together). In arrays the domain is the leading axis; a shared
value has a leading axis of one, so that NumPy's broadcasting joins it with the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dynbatch.types import Type

if TYPE_CHECKING:
    from dynbatch.ops.primitive import Primitive

SHARED = -1
ROW = 0


class Value(NamedTuple):
    """One value of a Program.

    ``kind`` is ``"op"`` for the result of an instruction, else where it comes from: ``arg`` (an Expression),
    ``list`` (the elements of a list argument), ``ptr`` (a list argument's segment boundaries), ``int`` and
    ``float`` (payload columns), ``slot`` (a parameter), ``table`` (a lookup parameter); and in gradient Programs
    ``dout`` (gradient of output ``index``) and ``fwd`` (value ``index`` of the forward Program).
    ``type`` is None for integers and boundaries.
    """

    kind: str
    index: int  # type: ignore[assignment]
    type: Type | None
    domain: int
    op: Primitive | None = None
    args: tuple[int, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()


class Program:
    """An immutable, interned straight-line program; see `Value` for its parts.

    Attributes:
        values: in order of computation; an instruction's arguments come before it.
        outputs: value ids of the outputs (forward Programs).
        results: ``(role, index, value id)`` of what a gradient Program yields, roles ``arg``, ``list``, ``slot``
            and ``table``; empty for forward Programs.
        name: the op or cell it was traced from, for people.
        layout: how many arguments, lists, integers, floats and slots a call has, whether it uses them or not.
        groups: for each list argument, the segment domain that its elements live in.
        cache: what backends derive from the Program.
    """

    def __init__(
        self,
        values: tuple[Value, ...],
        outputs: tuple[int, ...],
        results: tuple[tuple[str, int, int], ...],
        name: str,
        layout: tuple[int, int, int, int, int],
    ) -> None:
        self.values = values
        self.outputs = outputs
        self.results = results
        self.name = name
        self.layout = layout
        self.groups = {v.index: v.domain for v in values if v.kind == "list"}
        self.cache: dict[Any, Any] = {}

    def __repr__(self) -> str:
        lines = [f"program {self.name}"]
        for i, v in enumerate(self.values):
            domain = {SHARED: "shared", ROW: "row"}.get(v.domain, f"segment {v.domain}")
            what = f"{v.op.name}{list(v.args)}{dict(v.attrs) or ''}" if v.op else f"{v.kind} {v.index}"
            lines.append(f"  %{i}: {v.type} {domain} = {what}")
        lines.append(f"  outputs {list(self.outputs)} results {list(self.results)}")
        return "\n".join(lines)

    @property
    def instructions(self) -> list[int]:
        """Ids of the values that ops compute, in order."""
        return [i for i, v in enumerate(self.values) if v.op is not None]


_programs: dict[Any, Program] = {}


class Builder:
    """Collects values into a Program; equal instructions become one (common subexpressions)."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._known: dict[Any, int] = {}

    def type(self, v: int) -> Type:
        """Type of value ``v``, which is not an integer."""
        found = self.values[v].type
        assert found is not None
        return found

    def input(self, kind: str, index: int, type: Type | None, domain: int) -> int:
        """The value that comes from outside: the same one when asked twice."""
        return self._add(Value(kind, index, type, domain))

    def emit(self, op: Primitive, *args: int, **attrs: Any) -> int:
        """Append one instruction and return its value id; types and domains are inferred and checked."""
        domain = self._join(args)
        if op.reduces == "segments":
            domain = ROW
        elif op.reduces == "rows":
            domain = SHARED
        elif op.expands:
            domain = self.values[args[1]].index
        elif domain > ROW:
            args = tuple(self._expand(a, domain) if self._varies_by_row(a) else a for a in args)
        type = op.infer(*(self.values[a].type for a in args), **attrs)
        return self._add(Value("op", 0, type, domain, op, args, tuple(sorted(attrs.items()))))

    def ptr(self, domain: int) -> int:
        """Segment boundaries of a segment domain."""
        return self.input("ptr", domain, None, ROW)

    def finish(
        self,
        outputs: tuple[int, ...] = (),
        results: tuple[tuple[str, int, int], ...] = (),
        name: str = "",
        layout: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    ) -> Program:
        """The interned Program of what the outputs and results need; unused values are dropped."""
        needed = set(outputs) | {v for _, _, v in results}
        for i in range(len(self.values) - 1, -1, -1):
            if i in needed:
                needed.update(self.values[i].args)
        order = [i for i in range(len(self.values)) if i in needed]
        renumber = {old: new for new, old in enumerate(order)}
        values = tuple(self.values[i]._replace(args=tuple(renumber[a] for a in self.values[i].args)) for i in order)
        new_outputs = tuple(renumber[v] for v in outputs)
        new_results = tuple((role, index, renumber[v]) for role, index, v in results)
        key = (values, new_outputs, new_results, name, layout)
        found = _programs.get(key)
        if found is None:
            found = _programs.setdefault(key, Program(values, new_outputs, new_results, name, layout))
        return found

    def unify(self, domains: set[int]) -> int:
        """Make several segment domains one (lists that are zipped together)."""
        keep, *others = sorted(domains)
        for i, value in enumerate(self.values):
            if value.domain in others:
                value = value._replace(domain=keep)
            if value.kind == "ptr" and value.index in others:
                value = value._replace(index=keep)
            self.values[i] = value
        self._known = {value: i for i, value in enumerate(self.values)}
        return keep

    def _join(self, args: tuple[int, ...]) -> int:
        segments = {self.values[a].domain for a in args if self.values[a].domain > ROW}
        if len(segments) > 1:
            return self.unify(segments)
        if segments:
            return segments.pop()
        return max((self.values[a].domain for a in args), default=SHARED)

    def _varies_by_row(self, v: int) -> bool:
        return self.values[v].domain == ROW and self.values[v].kind != "ptr"

    def _expand(self, v: int, domain: int) -> int:
        from dynbatch.ops.segment import expand

        return self.emit(expand, v, self.ptr(domain))

    def _add(self, value: Value) -> int:
        found = self._known.get(value)
        if found is None:
            found = len(self.values)
            self.values.append(value)
            self._known[value] = found
        return found
