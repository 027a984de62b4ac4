"""Recording one op call: find its signature by the operands' types, append a node, return its handle.

An `Op` is what the public functions call. Its ``compose`` says in primitives what it computes; it runs once for each
combination of operand types and parameters, or inside the trace of a cell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import DynbatchError, IndexRangeError, ShapeError, user_line
from dynbatch.graph import Expression, Graph, Operand, check_live, handle, state
from dynbatch.signature import Signature

Payload = Sequence[Any]


_MOST_USES = 4  # combinations of operands that are compared one by one, before the table is searched


class Use:
    """Operands that an op was called with: expressions of these types, and these parameters, in this order.

    Attributes:
        keys: types and parameters.
        args: how many expressions there are.
    """

    def __init__(self, operands: list[Any], args: int, signature: Signature) -> None:
        self.keys = tuple([o.key for o in operands])
        self.args = args
        self.signature = signature

    def fits(self, operands: list[Any], graph: Graph) -> bool:
        """Whether these operands are of the same kinds, and the expressions of this graph."""
        if len(operands) != len(self.keys):
            return False
        keys = self.keys
        for i in range(len(operands)):
            operand = operands[i]
            if type(operand) is Expression:
                e = operand
                if e.graph is not graph or e.key is not keys[i]:
                    return False
            elif operand is not keys[i]:
                return False
        return True

    def record(self, operands: list[Any], graph: Graph) -> Expression:
        """Record a call with operands that fit."""
        at = graph.begin(self.signature, self.args)
        words = graph.words.at
        for operand in operands:
            if type(operand) is Expression:
                e = operand
                words[at] = e.vid
                at += 1
        return graph.end(at, self.signature.type)


class Op:
    """One public op.

    Arguments:
        name: as users call it.
        compose: ``compose(tracer, *operands, *ints, *floats, *static) -> value id`` over value ids.
    """

    def __init__(self, name: str, compose: Callable[..., int]) -> None:
        self.name = name
        self.compose = compose
        self.table: dict[Any, Signature] = {}

    def __call__(
        self, operands: Sequence[Any], ints: Payload = (), floats: Payload = (), static: tuple[Any, ...] = ()
    ) -> Expression:
        """Record a call. In a trace it is inlined instead."""
        return self.record(operands, ints, floats, static)

    def record(self, operands: Sequence[Any], ints: Payload, floats: Payload, static: tuple[Any, ...]) -> Expression:
        """The same, with all arguments in order."""
        if state.tracer is not None:
            return self.trace(operands, ints, floats, static)
        graph = state.graph
        vids = []
        for operand in operands:
            if type(operand) is Expression:
                e = operand
                if e.graph is not graph:
                    check_live(e)
                vids.append(e.vid)
            elif not operand.is_parameter:
                return self._record_lanes(operands, ints, floats, static)
        for f in floats:
            if type(f) is not float:
                floats = _numbers(self.name, floats)
                break
        signature = self.find(operands, len(ints), len(floats), static)
        if not vids and not ints and not floats and not signature.tail:
            return self._constant(graph, signature)
        graph.record(signature, [*vids, *ints])
        if floats:
            graph.floats.extend(floats)
        return graph.add(signature.type)

    def unary(self, x: Any) -> Expression:
        """Record a call with one operand and nothing else: the fast path of `__call__`."""
        if type(x) is Expression:
            e = x
            graph = e.graph
            signature = self.table.get(e.key)
            if signature is not None and graph is state.graph:
                at = graph.begin(signature, 1)
                graph.words.at[at] = e.vid
                return graph.end(at + 1, signature.type)
        return self((as_operand(x, self.name),))

    def binary(self, x: Any, y: Any) -> Expression:
        """Record a call with two operands and nothing else: the fast path of `__call__`."""
        if type(x) is Expression and type(y) is Expression:
            left, right = x, y
            graph = left.graph
            signature = self.table.get((left.key, right.key))
            if signature is not None and graph is right.graph and graph is state.graph:
                at = graph.begin(signature, 2)
                graph.words.at[at] = left.vid
                graph.words.at[at + 1] = right.vid
                return graph.end(at + 2, signature.type)
        return self.several([x, y])

    def several(self, operands: list[Any]) -> Expression:
        """Record a call with any operands and nothing else.

        Has a fast path for expressions and parameters mixed: an affine transform is what most nodes of a model without
        cells are. The first parameter knows the last few combinations in which it was used.
        """
        graph = state.graph
        table = _first_table(operands)
        uses = None if table is None else table.get(self)
        if uses is not None:
            for use in uses:
                if use.fits(operands, graph):
                    return use.record(operands, graph)
        checked = [as_operand(o, self.name) for o in operands]
        if table is not None and graph is not None:
            args = len([o for o in checked if type(o) is Expression])
            if args and args + len([o for o in checked if o.is_parameter]) == len(checked):
                uses = table.setdefault(self, [])
                uses.insert(0, Use(checked, args, self.find(checked, 0, 0)))
                del uses[_MOST_USES:]
        return self(checked)

    def find(self, operands: Sequence[Any], ints: int, floats: int, static: tuple[Any, ...] = ()) -> Signature:
        """The signature for operands like these, traced on first sight.

        Kept by the op, or by the first parameter among the operands, so that it lives as long as that does.
        """
        table = self.table
        key: Any
        for operand in operands:
            if type(operand) is not Expression and operand.is_parameter:
                table = operand.table
                key = (self, ints, floats, static, *[o if o.is_parameter else o.type for o in operands])
                break
        else:
            types = [o.type for o in operands]
            if not types:  # nothing else says which precision it is
                key = (state.graph.dtype, ints, floats, static)
            elif static or ints or floats or len(types) > 2:
                key = (ints, floats, static, *types)
            else:
                key = types[0] if len(types) == 1 else tuple(types)
        signature = table.get(key)
        if signature is None:
            tracer = Tracer(self.name, state.graph.dtype)
            values = [tracer.slot(o) if o.is_parameter else tracer.new_arg(o.type) for o in operands]
            values += [tracer.new_int() for _ in range(ints)]
            values += [tracer.new_float() for _ in range(floats)]
            signature = table.setdefault(key, tracer.signature((self._compose(tracer, operands, values, static),)))
        return signature

    def trace(
        self, operands: Sequence[Any], ints: Payload = (), floats: Payload = (), static: tuple[Any, ...] = ()
    ) -> Expression:
        """Inline the call into the cell that is being traced."""
        tracer = state.tracer
        values = [tracer.value_of(o) for o in operands]
        values += [tracer.int_of(i) for i in ints]
        values += [tracer.float_of(f) for f in floats]
        return tracer.expression(self._compose(tracer, operands, values, static))

    def _compose(self, tracer: Tracer, operands: Sequence[Any], values: list[int], static: tuple[Any, ...]) -> int:
        try:
            return self.compose(tracer, *values, *static)
        except DynbatchError as error:
            raise described(error, self.name, operands) from None

    def _constant(self, graph: Graph, signature: Signature) -> Expression:
        """A node that depends on parameters alone is recorded once a graph, as long as they do not change."""
        known = (signature, *signature.value_version())
        found = graph.constants.get(known)
        if found is None:
            graph.record(signature, [])
            found = graph.constants[known] = graph.add(signature.type)
        return found

    def _record_lanes(
        self, operands: Sequence[Any], ints: Payload, floats: Payload, static: tuple[Any, ...]
    ) -> Expression:
        """A call on manually batched operands or payload: one node a batch element."""
        lanes = lane_count(self.name, operands, ints, floats)
        signature = self.find(operands, len(ints), len(floats), static)
        columns = [spread(o.vids, lanes) for o in operands if not o.is_parameter]
        columns += [spread(i if isinstance(i, Lanes) else (i,), lanes) for i in ints]
        floating = [spread(_numbers(self.name, f if isinstance(f, Lanes) else (f,)), lanes) for f in floats]
        return record_rows(signature, columns, floating, lanes)

    def lanes(
        self, operands: Sequence[Any], ints: Payload = (), floats: Payload = (), static: tuple[Any, ...] = ()
    ) -> Expression:
        """Record a call whose payload may differ between batch elements (entries that are `Lanes`)."""
        if state.tracer is not None:
            raise DynbatchError(
                f"{user_line()}: {self.name}: batch elements are not for use in a cell; call the cell on them instead"
            )
        operands = [o if getattr(o, "is_lookup", False) else as_operand(o) for o in operands]
        return self._record_lanes(operands, ints, floats, static)


def _first_table(operands: list[Any]) -> dict[Any, Any] | None:
    """The table of the first operand that is a parameter; None where something else than an expression comes before."""
    for operand in operands:
        if type(operand) is not Expression:
            return operand.table if getattr(operand, "is_parameter", False) else None
    return None


def _numbers(name: str, floats: Payload) -> list[float]:
    """Float payload, checked before anything is recorded: half a node in the stream would ruin the graph."""
    for f in floats:
        if isinstance(f, Operand) or not hasattr(f, "__float__"):
            raise TypeError(f"{user_line()}: {name}: expected a number, not {type(f).__name__}")
    return [float(f) for f in floats]


class Lanes(tuple[Any, ...]):
    """A payload with one entry a batch element."""

    __slots__ = ()


def spread(values: Sequence[Any], lanes: int) -> Sequence[Any]:
    """One entry a lane: a single one is repeated."""
    return values if len(values) == lanes else tuple(values) * lanes


def lane_count(name: str, operands: Sequence[Any], ints: Payload = (), floats: Payload = ()) -> int:
    """The number of batch elements; raises `ShapeError` where operands disagree."""
    for operand in operands:
        if not operand.is_parameter:
            check_live(operand)
    sizes = {len(o.vids) for o in operands if not o.is_parameter}
    sizes |= {len(p) for p in (*ints, *floats) if isinstance(p, Lanes)}
    sizes.discard(1)
    if len(sizes) > 1:
        raise ShapeError(f"{user_line()}: {name}: batch sizes {sorted(sizes)} differ")
    return sizes.pop() if sizes else 1


def record_rows(
    signature: Signature, columns: Sequence[Sequence[int]], floats: Sequence[Sequence[float]], lanes: int
) -> Expression:
    """Append one node for each lane; `columns` hold what the stream gets behind the signature, by place."""
    graph = state.graph
    first = graph.values
    for lane, row in enumerate(zip(*columns)) if columns else enumerate([()] * lanes):
        graph.record(signature, list(row))
        if floats:
            graph.floats.extend([column[lane] for column in floats])
    graph.values = first + lanes
    if lanes > 1:
        graph.lanes.extend((first, lanes))
    return handle(graph, range(first, first + lanes), signature.type)


def checked_index(name: str, index: Any, size: int, what: str) -> int:
    """An index within 0 to size - 1; negative ones count from the end.

    Raises:
        IndexRangeError: names the op, the index, what it indexes and the size.
    """
    try:
        i = operator.index(index)
    except TypeError:
        raise TypeError(f"{user_line()}: {name}: an index must be an integer, not {type(index).__name__}") from None
    if not -size <= i < size:
        raise IndexRangeError(f"{user_line()}: {name}: index {i} is out of range for {what} of size {size}")
    return i + size if i < 0 else i


def as_operand(x: Any, name: str = "") -> Any:
    """``x`` where it is an operand; raises TypeError for anything else, naming the op where there is a name."""
    if isinstance(x, Operand):
        if state.tracer is None and isinstance(x, Expression):
            check_live(x)
        return x
    raise TypeError(
        f"{user_line()}: {f'{name}: ' if name else ''}expected an Expression or a parameter, not {type(x).__name__}"
    )


def as_expression(x: Any) -> Expression:
    """``x`` as an expression: a parameter becomes a node of its own."""
    x = as_operand(x)
    return identity((x,)) if x.is_parameter else x


def described(error: DynbatchError, name: str, operands: Sequence[Any]) -> DynbatchError:
    """The same error with the user's line, the op and the parameters involved."""
    named = [f"{o.name} {o.shape}" for o in operands if o.is_parameter]
    message = str(error)
    if not message.startswith(name):
        message = f"{name}: {message}"
    suffix = f" (parameters: {', '.join(named)})" if named else ""
    return type(error)(f"{user_line()}: {message}{suffix}")


def _identity(t: Tracer, x: int) -> int:
    from dynbatch.ops.shape import reshape

    return t.emit(reshape, x, shape=t.type(x).shape)


identity = Op("parameter", _identity)
