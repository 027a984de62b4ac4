"""Cells: a function traced once per types of its inputs into one Program, and recorded as one node a call.

While it is traced, the function sees symbolic values. What differs between calls, numbers given to it, is payload:
symbolic too, so that one Program serves all calls. A list of expressions is one ragged argument: iterating over it
yields a single symbolic element that stands for each of them, and a reduction such as ``esum`` ends it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from dynbatch.compiler.ir import ROW
from dynbatch.config import config
from dynbatch.errors import CellError, ShapeError, user_line
from dynbatch.graph import BatchedExpression, Expression, Graph, Operand, check_live, handle, state
from dynbatch.guards import Guards, Inlined
from dynbatch.ops.elementwise import to_float
from dynbatch.ops.record import checked_index, lane_count, spread
from dynbatch.recorder import Recorder, form_of
from dynbatch.signature import Signature
from dynbatch.tracing import COUNTED, CellTracer, Payload, Ragged, Traced

_MOST_VARIANTS = 16  # traces kept for one combination of types
_INT_END = 1 << 63  # integer payload is stored in 64 bits


class Variant:
    """One trace of a cell: its signature, the shape of what it returns, and the guards it depends on.

    Attributes:
        returns: how many outputs: 0 for one Expression, n for a tuple of n.
        pinned: integer payloads that cannot count from the end, since they index several sizes or serve as numbers.
    """

    __slots__ = ("guards", "holds", "pinned", "returns", "signature")

    def __init__(self, signature: Signature, returns: int, guards: Guards) -> None:
        self.signature = signature
        self.returns = returns
        self.guards = guards
        self.holds = guards.compile()
        values = signature.program.values
        self.pinned = {values[v.args[0]].index for v in values if v.op is to_float}
        sizes = {(position, size) for position, size, _, _ in signature.bounds}
        self.pinned |= {p for p, n in sizes if (p, n) != next(b for b in sizes if b[0] == p)}


class Cell:
    """A traced function; see `cell`."""

    def __init__(self, function: Callable[..., Any], static: Sequence[str]) -> None:
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"@dy.cell goes on a function or a method, not on {type(function).__name__}")
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__qualname__.replace("<locals>.", "")
        self.parameters = inspect.signature(function)
        names = list(self.parameters.parameters)
        unknown = set(static) - set(names)
        if unknown:
            raise TypeError(f"@dy.cell: {self.name} has no argument {', '.join(sorted(unknown))}")
        kinds = {name: p.kind for name, p in self.parameters.parameters.items()}
        if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}.isdisjoint(kinds.values()):
            raise TypeError(f"@dy.cell: {self.name} must name its arguments; pass several expressions as a list")
        self.keyword_only = tuple(name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY)
        self.static = frozenset(static)
        self.attribute = function.__name__
        self.owner: type | None = None
        self._unbound: BoundCell | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.owner = owner
        present: Any = owner.__getstate__
        if present is object.__getstate__:
            setattr(owner, "__getstate__", _state_without_cells)  # noqa: B010  mypy does not let a method be assigned

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if state.tracer is not None:
            return Inlined(self, instance)
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"@dy.cell: {self.name}: a {type(instance).__name__} has no place for its traces: add "
                f'"__dict__" to the __slots__ of the class'
            )
        key = self._key(type(instance))
        found = instance.__dict__.get(key)
        if found is None or found.bound_cell.instance is not instance:
            found = instance.__dict__[key] = BoundCell(self, instance, key).recorder
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a plain function, or of a method on its class: ``Base.compose(self, left, right)``."""
        if self.owner is not None and args and isinstance(args[0], self.owner):
            return self.__get__(args[0], self.owner)(*args[1:], **kwargs)
        if self._unbound is None:
            self._unbound = BoundCell(self, None, "")
        return self._unbound.recorder(*args, **kwargs)

    def _key(self, cls: type) -> str:
        """Where in an instance's dictionary its bound cell lies.

        Under the name of the method, where Python finds it before it comes to the descriptor; but elsewhere for a
        method that is overridden (and called by ``super()``), and for instances whose copies would take it along.
        """
        found = next((base.__dict__[self.attribute] for base in cls.__mro__ if self.attribute in base.__dict__), None)
        own_ways = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
        plain = all(getattr(cls, name, None) is getattr(object, name, None) for name in own_ways)
        state_of: Any = cls.__getstate__
        if found is self and plain and state_of is _state_without_cells:
            return self.attribute
        return f"cell {self.name}"


def _state_without_cells(self: Any) -> Any:
    """``__getstate__`` of classes with cells: a copy of an instance traces its own."""
    found = object.__getstate__(self)
    attributes, *rest = found if isinstance(found, tuple) else (found,)
    kept = {k: v for k, v in (attributes or {}).items() if not (hasattr(v, "bound_cell") and v.bound_cell.key == k)}
    return (kept, *rest) if rest else kept


class BoundCell:
    """A cell on one object (or on none, for a plain function), with its traces; ``key``: see `Cell`."""

    def __init__(self, cell: Cell, instance: Any, key: str) -> None:
        self.cell = cell
        self.instance = instance
        self.key = key
        self.variants: dict[Any, list[Variant]] = {}
        skip = 0 if instance is None else 1
        self.names = list(cell.parameters.parameters)[skip:]
        self._static = [n in cell.static for n in self.names]
        self.__name__ = cell.function.__name__
        self.__doc__ = cell.function.__doc__
        self.recorder = Recorder(self)

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call of any kind: one node; inlined within the trace of another cell."""
        if state.tracer is not None:
            guards: Guards = state.tracer.guards
            own = () if self.instance is None else (guards.stand_in(self.instance, guards.root(self.instance)),)
            return guards.instrument(self.cell.function)(*own, *args, **kwargs)
        if kwargs or len(args) != len(self.names) or self.cell.keyword_only:
            args = self._positional(args, kwargs)
        return self._record(args)

    def _record(self, args: tuple[Any, ...]) -> Any:
        """Record a call with all arguments in order."""
        graph = state.graph
        key: list[Any] = [graph.dtype]  # payload alone does not say which precision it is
        vids: list[int] = []
        ints: list[Any] = []
        floats: list[float] = []
        lists: list[Sequence[Expression]] = []
        for static, name, arg in zip(self._static, self.names, args):
            kind = type(arg)
            if kind is Expression and not static:
                if arg.graph is not graph:
                    check_live(arg)
                key.append(arg.key)
                vids.append(arg.vid)
            elif kind is int and not static:
                key.append(int)
                ints.append(arg)
            elif not self._flatten(static, name, arg, key, vids, ints, floats, lists):
                return self._call_lanes(args)
        variant = self._find(tuple(key), args, graph)
        signature = variant.signature
        for position, size, name, what in signature.bounds:
            if not 0 <= ints[position] < size:
                self._refuse_negative(variant, ints[position], position)
                ints[position] = checked_index(name, ints[position], size, what)
        if ints and not -_INT_END <= min(ints) <= max(ints) < _INT_END:
            raise CellError(
                f"{user_line()}: cell {self.cell.name}: an integer payload does not fit 64 bits: {max(ints)}"
            )
        if signature.equal_lists:
            _check_lengths(self.cell.name, signature, lists)
        for elements in lists:
            vids.append(len(elements))
            vids.extend([e.vid for e in elements])
        graph.record(signature, vids + ints)
        if floats:
            graph.floats.extend(floats)
        if not variant.returns:
            return graph.add(signature.type)
        return tuple([graph.add(t) for t in signature.types])

    # ---- arguments --------------------------------------------------------------------------------------------------

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        own = () if self.instance is None else (self.instance,)
        bound = self.cell.parameters.bind(*own, *args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())[len(own) :]

    def _flatten(
        self,
        static: bool,
        name: str,
        arg: Any,
        key: list[Any],
        vids: list[int],
        ints: list[Any],
        floats: list[float],
        lists: list[Sequence[Expression]],
    ) -> bool:
        """Take one argument apart into its part of the key and its data; False for batch elements."""
        if static or arg is None or isinstance(arg, str):
            key.append(("static", type(arg), arg))
            return True
        if isinstance(arg, BatchedExpression):
            return False
        if isinstance(arg, Expression):
            check_live(arg)
            key.append(arg.key)
            vids.append(arg.vid)
        elif getattr(arg, "is_parameter", False):
            key.append(arg)
        elif isinstance(arg, tuple):
            key.append(("tuple", type(arg), len(arg)))
            return all(self._flatten(False, name, a, key, vids, ints, floats, lists) for a in arg)
        elif isinstance(arg, list):
            return self._flatten_list(name, arg, key, lists)
        elif hasattr(arg, "__index__") and getattr(arg, "ndim", 0) == 0:
            key.append(int)
            ints.append(int(arg))
        elif hasattr(arg, "__float__") and getattr(arg, "ndim", 0) == 0:
            key.append(float)
            floats.append(float(arg))
        else:
            raise CellError(
                f"{user_line()}: cell {self.cell.name}: argument {name} is a {type(arg).__name__}, which is neither an "
                f'expression nor a number; declare it with @dy.cell(static=("{name}",)) if it is part of the structure'
            )
        return True

    def _refuse_negative(self, variant: Variant, index: int, position: int) -> None:
        if index < 0 and position in variant.pinned:
            raise CellError(
                f"{user_line()}: cell {self.cell.name}: index {index} counts from the end, but the cell uses it in "
                f"several ways; give the index from the start"
            )

    def _flatten_list(self, name: str, arg: list[Any], key: list[Any], lists: list[Sequence[Expression]]) -> bool:
        if not arg:
            key.append("empty list")
            return True
        from dynbatch.ops.record import as_expression

        elements = [e if type(e) is Expression else as_expression(e) for e in arg]
        if any(isinstance(e, BatchedExpression) for e in elements):
            return False
        first = elements[0].type
        for position, e in enumerate(elements):
            check_live(e)
            if e.type is not first:
                raise ShapeError(
                    f"{user_line()}: cell {self.cell.name}: elements of the list {name} differ in shape: {first.shape} "
                    f"at position 0, {e.type.shape} at position {position}"
                )
        key.append(("list", first))
        lists.append(elements)
        return True

    def _call_lanes(self, args: tuple[Any, ...]) -> Any:
        """A call on manually batched expressions: one node a batch element."""
        flat: list[Expression] = []
        _expressions(args, flat)
        lanes = lane_count(self.cell.name, flat)
        calls = [self._record(tuple(_lane(args, lane, lanes))) for lane in range(lanes)]
        graph = state.graph
        if isinstance(calls[0], tuple):
            joined = tuple(handle(graph, [c[o].vid for c in calls], calls[0][o].type) for o in range(len(calls[0])))
            graph.lanes.extend((calls[0][0].vid, lanes))
            return joined
        graph.lanes.extend((calls[0].vid, lanes))
        return handle(graph, [c.vid for c in calls], calls[0].type)

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def _find(self, key: tuple[Any, ...], args: tuple[Any, ...], graph: Graph) -> Variant:
        """The trace for these types whose guards hold; made on first sight.

        Kept here, or by the first parameter among the arguments, so that it lives no longer than that does.
        """
        parameter = next((k for k in key if getattr(k, "is_parameter", False)), None)
        try:
            if parameter is None:
                variants = self.variants.setdefault(key, [])
            else:
                variants = parameter.table.setdefault((self, key), [])
        except TypeError:
            raise CellError(f"{user_line()}: cell {self.cell.name}: static arguments must be hashable") from None
        for variant in variants:
            if variant.holds():
                if config.debug:
                    self._compare(variant, args, graph)
                return variant
        variant = self._trace_checked(args, graph)
        broken = variant.guards.broken()
        if broken:
            raise CellError(
                f"{user_line()}: cell {self.cell.name} reads {broken}, which gives another object each time, so that "
                f"a trace could not be used twice; keep it in an attribute, or pass what depends on it as an argument"
            )
        variants.insert(0, variant)
        del variants[_MOST_VARIANTS:]
        self.recorder.form = form_of(self, variant, args) or self.recorder.form
        return variant

    def _compare(self, variant: Variant, args: tuple[Any, ...], graph: Graph) -> None:
        fresh = self._trace(args, graph, max(1, _longest_list(args))).signature
        known = variant.signature
        if fresh.program is not known.program or fresh.tail != known.tail or fresh.binding != known.binding:
            raise CellError(
                f"{user_line()}: cell {self.cell.name} does not do now what it did when it was traced: it depends on "
                f"something that is neither an argument nor an attribute of self, or on the length of a list"
            )

    def _trace_checked(self, args: tuple[Any, ...], graph: Graph) -> Variant:
        """Trace, and where there is a ragged list check that its length does not matter.

        The function is run on lists that yield their symbolic element once, and again on lists that yield it twice:
        code that counts elements, folds them with an operator or uses their positions gives two different Programs.
        """
        variant = self._trace(args, graph, 1)
        if variant.signature.program.layout[1]:
            other = self._trace(args, graph, 2)
            if other.signature.program is not variant.signature.program:
                raise CellError(COUNTED.format(line=user_line(), name=self.cell.name))
        return variant

    def _trace(self, args: tuple[Any, ...], graph: Graph, copies: int) -> Variant:
        guards = Guards()
        tracer = CellTracer(self.cell.name, graph.dtype, copies, guards)
        symbolic = [self._symbol(tracer, s, n, a) for s, n, a in zip(self._static, self.names, args)]
        named = {n: symbolic.pop() for n in reversed(self.cell.keyword_only)}
        own = []
        if self.instance is not None:
            own.append(guards.stand_in(self.instance, guards.root(self.instance)))
        function = guards.instrument(self.cell.function)
        state.tracer = tracer
        state.graph = None  # type: ignore[assignment]
        try:
            result = function(*own, *symbolic, **named)
        finally:
            state.tracer = None
            state.graph = graph
        several = isinstance(result, (tuple, list))
        outputs = tuple(self._output(tracer, r) for r in (result if several else (result,)))
        if not outputs:
            raise CellError(f"{user_line()}: cell {self.cell.name} returns an empty tuple")
        return Variant(tracer.signature(outputs), len(outputs) if several else 0, guards)

    def _symbol(self, tracer: CellTracer, static: bool, name: str, arg: Any) -> Any:
        """What stands for an argument in the trace."""
        if static or arg is None or isinstance(arg, str) or getattr(arg, "is_parameter", False):
            return arg
        if isinstance(arg, Expression):
            return Traced(tracer, tracer.new_arg(arg.type))
        if isinstance(arg, tuple):
            parts = [self._symbol(tracer, False, name, a) for a in arg]
            return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
        if isinstance(arg, list):
            return Ragged(tracer, tracer.new_list(arg[0].type)) if arg else []
        if hasattr(arg, "__index__"):
            return Payload(tracer, tracer.new_int(), "int", name)
        return Payload(tracer, tracer.new_float(), "float", name)

    def _output(self, tracer: CellTracer, result: Any) -> int:
        if isinstance(result, Payload):
            return tracer.float_of(result)
        if not isinstance(result, Operand):
            raise CellError(
                f"{user_line()}: cell {self.cell.name} must return an Expression or a tuple of them, not "
                f"{type(result).__name__}"
            )
        v = tracer.value_of(result)
        if tracer.values[v].domain > ROW:
            raise CellError(
                f"{user_line()}: cell {self.cell.name} returns a value that exists once for each element of a list; "
                f"combine the elements with esum, average, emax or logsumexp first"
            )
        return v


def _check_lengths(name: str, signature: Signature, lists: list[Sequence[Expression]]) -> None:
    for group in signature.equal_lists:
        if len({len(lists[i]) for i in group}) > 1:
            lengths = ", ".join(str(len(lists[i])) for i in group)
            raise ShapeError(f"{user_line()}: cell {name}: lists that are combined differ in length: {lengths}")


def _expressions(args: Any, found: list[Expression]) -> None:
    for arg in args:
        if isinstance(arg, Expression):
            found.append(arg)
        elif isinstance(arg, (tuple, list)):
            _expressions(arg, found)


def _longest_list(args: Any) -> int:
    return max(
        (len(a) if isinstance(a, list) else _longest_list(a) for a in args if isinstance(a, (tuple, list))), default=0
    )


def _lane(args: Any, lane: int, lanes: int) -> list[Any]:
    """The arguments for one batch element."""
    result: list[Any] = []
    for arg in args:
        if isinstance(arg, Expression):
            vids = spread(arg.vids, lanes)
            result.append(Expression(arg.graph, vids[lane], arg.type))
        elif isinstance(arg, tuple):
            parts = _lane(arg, lane, lanes)
            result.append(type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts))
        elif isinstance(arg, list):
            result.append(_lane(arg, lane, lanes))
        else:
            result.append(arg)
    return result


def cell(function: Callable[..., Any] | None = None, *, static: Sequence[str] = ()) -> Any:
    """Make a function or method a cell: traced once per types of its inputs, recorded as one node a call.

    ```python
    @dy.cell
    def compose(self, left, right):
        return dy.tanh(dy.affine_transform([self.b, self.W, left, self.U, right]))
    ```

    Results and gradients equal those of the undecorated function; fewer, larger nodes record faster and compile into
    fewer kernels.

    Arguments:
        function: takes expressions, tuples of expressions, lists of expressions of one shape (any length; combined by
            ``esum`` and the like), and numbers, which are payload: they may differ between calls. Parameters that it
            uses are found by the trace, and what it reads from ``self``, its closure and globals is noted: when that
            has changed, it is traced again. It returns an Expression or a tuple.
        static: names of arguments that are part of the structure; each value has a trace of its own.

    Raises:
        CellError: at a call, where the function reads a value, branches on a payload, uses an expression from
            outside, counts a list's elements, or returns one value for each of them.
    """
    names = (static,) if isinstance(static, str) else tuple(static)
    if function is None:
        return lambda f: Cell(f, names)
    return Cell(function, names)
