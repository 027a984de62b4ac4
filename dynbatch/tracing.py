"""What a cell's function sees while it is traced: symbolic expressions, payload, and ragged lists."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from dynbatch.compiler.ir import ROW
from dynbatch.compiler.trace import Tracer
from dynbatch.errors import CellError, ShapeError, user_line
from dynbatch.graph import Expression, Operand
from dynbatch.guards import Guards
from dynbatch.types import Type


class CellTracer(Tracer):
    """A Tracer that runs Python code on symbolic values.

    Arguments:
        name: of the cell.
        dtype: of the graph.
        copies: how often iterating over a ragged list yields its one symbolic element. Code that is right for lists
            of any length gives the same Program for one copy as for two; see `_trace`.
        guards: notes of what the function reads from outside.
    """

    def __init__(self, name: str, dtype: str, copies: int, guards: Guards) -> None:
        super().__init__(name, dtype)
        self.copies = copies
        self.guards = guards
        self.iterating = 0

    def expression(self, v: int) -> Traced:
        """A symbolic expression of value ``v``."""
        return Traced(self, v)

    def value_of(self, x: Any) -> int:
        """The value id of an operand; raises `CellError` for an expression from outside."""
        if isinstance(x, Traced):
            if x.tracer is not self:
                raise CellError(f"{user_line()}: {self.name}: a value of another trace was used; do not store them")
            return x.value_id
        if getattr(x, "is_parameter", False):
            return self.slot(x)
        if isinstance(x, Expression):
            raise CellError(
                f"{user_line()}: cell {self.name} uses an expression from outside; pass it as an argument instead"
            )
        raise TypeError(f"{user_line()}: {self.name}: expected an Expression or a parameter, not {type(x).__name__}")

    def int_of(self, x: Any) -> int:
        """The value id of an integer payload or literal."""
        if isinstance(x, Payload):
            if x.kind != "int":
                raise CellError(
                    f"{user_line()}: cell {self.name}: an index is an integer argument as it was given, not a float or "
                    f"the result of arithmetic; compute it outside of the cell"
                )
            return x.value_id
        return self.literal_int(x)

    def float_of(self, x: Any) -> int:
        """The value id of a number: payload or literal."""
        if isinstance(x, Payload):
            return x.value_id if x.kind == "float" else self.to_float(x.value_id)
        if isinstance(x, Traced):
            return x.value_id
        return self.constant(float(x))

    def random_key(self, like: int | None = None) -> int:
        """See `Tracer.random_key`; raises `CellError` where a draw in a loop over a list is not of its elements."""
        if self.iterating and (like is None or self.values[like].domain <= ROW):
            raise CellError(
                f"{user_line()}: cell {self.name} draws random numbers in a loop over a list, which do not belong to "
                f"its elements; draw them outside of the loop"
            )
        return super().random_key(like)

    def reduce_list(self, op: Any, operands: Sequence[Any]) -> Traced:
        """A list reduction in a trace: of a ragged list's elements, of a list of known length, or of both.

        Within a loop over a ragged list it is of known length: what the loop's body made for one element.
        """
        if self.iterating:
            return self._reduce_known(op, [self.value_of(o) for o in operands])
        ragged: dict[int, int] = {}
        plain: list[int] = []
        for operand in operands:
            v = self.value_of(operand)
            if self.values[v].domain > ROW:
                ragged[v] = ragged.get(v, 0) + 1
            else:
                plain.append(v)
        parts: list[tuple[int, int]] = []
        for v, times in ragged.items():
            if times % self.copies:
                raise CellError(COUNTED.format(line=user_line(), name=self.name))
            parts += [(v, self.values[v].domain)] * (times // self.copies)
        if not parts:
            return self._reduce_known(op, plain)
        reduced = [op.compose(self, v, self.ptr(self.values[v].domain)) for v, _ in parts]
        if op.name == "average" and (len(reduced) > 1 or plain):
            raise CellError(f"{user_line()}: {self.name}: average of a ragged list together with other values")
        return self._reduce_known(op, reduced + plain) if len(reduced) + len(plain) > 1 else Traced(self, reduced[0])

    def _reduce_known(self, op: Any, values: list[int]) -> Traced:
        """A reduction of a list whose length is part of the structure."""
        from dynbatch.ops import elementwise as ew

        types = [self.type(v) for v in values]
        if op.name != "esum" and any(t is not types[0] for t in types):
            raise ShapeError(f"{user_line()}: {op.name}: shapes differ: {', '.join(str(t.shape) for t in types)}")
        primitive = {"emax": ew.emax, "logsumexp": ew.logaddexp}.get(op.name, ew.add)
        result = functools.reduce(lambda a, b: self.emit(primitive, a, b), values)
        if op.name == "average":
            result = self.emit(ew.cmult, result, self.constant(1.0 / len(values)))
        return Traced(self, result)


COUNTED = (
    "{line}: cell {name} depends on the number of elements of a list; a list of expressions is traced once for every "
    "length, so combine its elements with esum, average, emax or logsumexp"
)
_TRACED_KEY = object()


def _refuse_reading(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise CellError(
        f"{user_line()}: cell {self.tracer.name} reads a value, which a trace does not have; read it outside of the "
        f"cell and pass it as an argument"
    )


class Traced(Expression):
    """A symbolic value in a trace."""

    __slots__ = ("tracer", "value_id")

    def __init__(self, tracer: CellTracer, value_id: int) -> None:
        super().__init__(None, -1, _TRACED_KEY)  # type: ignore[arg-type]
        self.tracer = tracer
        self.value_id = value_id

    @property
    def type(self) -> Type:
        """Shape and dtype of the value."""
        return self.tracer.type(self.value_id)

    def dim(self) -> tuple[tuple[int, ...], int]:
        """(shape, 1)."""
        return self.type.shape, 1

    @property
    def vids(self) -> NoReturn:
        """Not there: a cell sees one batch element."""
        raise CellError(
            f"{user_line()}: cell {self.tracer.name} works on batch elements, which a trace does not have; call it on "
            f"the batched expression instead"
        )

    def __repr__(self) -> str:
        return f"<traced {self.type}>"

    npvalue = value = scalar_value = vec_value = argmax_value = _refuse_reading
    forward = backward = gradient = __float__ = __bool__ = _refuse_reading


class Payload:
    """A number given to the cell, which differs between calls: usable where ops take numbers, not for branching."""

    is_payload = True

    def __init__(self, tracer: CellTracer, value_id: int, kind: str, name: str) -> None:
        self.tracer = tracer
        self.value_id = value_id
        self.kind = kind
        self.name = name

    def _refuse(self, *args: Any) -> NoReturn:
        raise CellError(
            f'{user_line()}: cell {self.tracer.name} branches on (or reads) its argument "{self.name}", which is '
            f'payload and differs between calls; declare it with @dy.cell(static=("{self.name}",))'
        )

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = __index__ = __float__ = _refuse
    __hash__ = __str__ = __format__ = __abs__ = __round__ = __mod__ = __floordiv__ = _refuse

    def _arithmetic(self, name: str, x: Any, y: Any) -> Any:
        from dynbatch.ops import elementwise as ew

        if isinstance(x, Operand) or isinstance(y, Operand):
            return NotImplemented
        t = self.tracer
        return Payload(t, t.emit(getattr(ew, name), t.float_of(x), t.float_of(y)), "float", self.name)

    def __add__(self, other: Any) -> Any:
        return self._arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._arithmetic("subtract", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._arithmetic("subtract", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._arithmetic("cmult", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._arithmetic("cdiv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._arithmetic("cdiv", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._arithmetic("power", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._arithmetic("power", other, self)

    def __neg__(self) -> Any:
        return self._arithmetic("subtract", 0.0, self)


class _LengthError(CellError, TypeError):
    """Also a TypeError, which ``list(x)`` and ``[*x]`` ignore when they ask for a length to reserve room."""


class Ragged:
    """A list of expressions given to the cell: one symbolic element, whatever the length (at least one)."""

    def __init__(self, tracer: CellTracer, value_id: int) -> None:
        self.tracer = tracer
        self.element = Traced(tracer, value_id)

    def __iter__(self) -> Iterator[Traced]:
        if self.tracer.iterating:
            raise CellError(
                f"{user_line()}: cell {self.tracer.name} loops over a list within a loop over a list; "
                f"zip() walks lists of one length together"
            )
        return self._elements()

    def _elements(self) -> Iterator[Traced]:
        drawn = self.tracer.draws
        for _ in range(self.tracer.copies):
            self.tracer.draws = drawn  # what an element draws, every element draws
            self.tracer.iterating += 1
            try:
                yield self.element
            finally:
                self.tracer.iterating -= 1

    def __bool__(self) -> bool:
        return True  # an empty list is traced on its own, as an empty list

    def _refuse(self, *args: Any) -> NoReturn:
        raise CellError(COUNTED.format(line=user_line(), name=self.tracer.name))

    def __len__(self) -> int:
        raise _LengthError(COUNTED.format(line=user_line(), name=self.tracer.name))

    __getitem__ = __reversed__ = __add__ = __radd__ = _refuse
