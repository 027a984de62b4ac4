"""Cells: a function traced once per types of its inputs into one Program, and recorded as one node a call.

While it is traced, the function sees symbolic values. What differs between calls, numbers given to it, is payload:
symbolic too, so that one Program serves all calls. A list of expressions is one ragged argument: iterating over it
yields a single symbolic element that stands for each of them, and a reduction such as ``esum`` ends it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from dynbatch.compiler.ir import ROW
from dynbatch.compiler.trace import Tracer
from dynbatch.config import config
from dynbatch.errors import CellError, ShapeError, user_line
from dynbatch.graph import BatchedExpression, Expression, Graph, Operand, check_live, handle, state
from dynbatch.guards import Guards
from dynbatch.ops.record import append_tail, checked_index, lane_count, spread
from dynbatch.signature import Signature
from dynbatch.types import Type

_MOST_VARIANTS = 16  # traces kept for one combination of types; more means that a guard never holds twice


class CellTracer(Tracer):
    """A Tracer that runs Python code on symbolic values.

    Arguments:
        name: of the cell.
        dtype: of the graph.
        copies: how often iterating over a ragged list yields its one symbolic element. Code that is right for lists
            of any length gives the same Program for one copy as for two; see `_trace`.
    """

    def __init__(self, name: str, dtype: str, copies: int) -> None:
        super().__init__(name, dtype)
        self.copies = copies
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
                raise CellError(f"{user_line()}: {self.name}: a float payload cannot be an index")
            return x.value_id
        return self.literal_int(x)

    def float_of(self, x: Any) -> int:
        """The value id of a number: payload or literal."""
        if isinstance(x, Payload):
            return x.value_id if x.kind == "float" else self.to_float(x.value_id)
        if isinstance(x, Traced):
            return x.value_id
        return self.constant(float(x))

    def reduce_list(self, op: Any, operands: Sequence[Any]) -> Traced:
        """A list reduction in a trace: of a ragged list's elements, of a list of known length, or of both."""
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
                raise CellError(_COUNTED.format(line=user_line(), name=self.name))
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
        result = values[0]
        if op.name == "logsumexp":
            top = functools.reduce(lambda a, b: self.emit(ew.bmax, a, b), values)
            terms = [self.emit(ew.exp, self.emit(ew.subtract, v, self.emit(ew.stop_gradient, top))) for v in values]
            total = functools.reduce(lambda a, b: self.emit(ew.add, a, b), terms)
            return Traced(self, self.emit(ew.add, self.emit(ew.log, total), self.emit(ew.stop_gradient, top)))
        primitive = ew.bmax if op.name == "emax" else ew.add
        for v in values[1:]:
            result = self.emit(primitive, result, v)
        if op.name == "average":
            result = self.emit(ew.cmult, result, self.constant(1.0 / len(values)))
        return Traced(self, result)


_COUNTED = (
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
    def type(self) -> Type:  # type: ignore[override]
        """Shape and dtype of the value."""
        return self.tracer.type(self.value_id)

    def dim(self) -> tuple[tuple[int, ...], int]:
        """(shape, 1)."""
        return self.type.shape, 1

    def __repr__(self) -> str:
        return f"<traced {self.type}>"

    npvalue = value = scalar_value = vec_value = argmax_value = _refuse_reading
    forward = backward = gradient = __float__ = __bool__ = _refuse_reading  # type: ignore[assignment]


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

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = __index__ = _refuse  # type: ignore[assignment]
    __hash__ = __str__ = __format__ = _refuse  # type: ignore[assignment]

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

    def __neg__(self) -> Any:
        return self._arithmetic("subtract", 0.0, self)


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
        for _ in range(self.tracer.copies):
            self.tracer.iterating += 1
            try:
                yield self.element
            finally:
                self.tracer.iterating -= 1

    def __bool__(self) -> bool:
        return True  # an empty list is traced on its own, as an empty list

    def _refuse(self, *args: Any) -> NoReturn:
        raise CellError(_COUNTED.format(line=user_line(), name=self.tracer.name))

    __len__ = __getitem__ = __reversed__ = __add__ = __radd__ = _refuse  # type: ignore[assignment]


class Variant:
    """One trace of a cell: its signature, the shape of what it returns, and the guards it depends on."""

    __slots__ = ("guards", "holds", "returns", "signature")

    def __init__(self, signature: Signature, returns: int, guards: Guards) -> None:
        self.signature = signature
        self.returns = returns  # 0: one Expression; n: a tuple of n
        self.guards = guards
        self.holds = guards.compile()


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
        self.static = frozenset(static)
        self.attribute = function.__name__
        self._unbound: BoundCell | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        bound = BoundCell(self, instance)
        bound.install(bound)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._unbound is None:
            self._unbound = BoundCell(self, None)
            self._unbound.install(self._unbound)
        return self._unbound.fastest(*args, **kwargs)


class BoundCell:
    """A cell on one object (or on none, for a plain function), with its traces."""

    def __init__(self, cell: Cell, instance: Any) -> None:
        self.cell = cell
        self.instance = instance
        self.bound_cell = self
        self.fastest: Callable[..., Any] = self
        self.variants: dict[Any, list[Variant]] = {}
        skip = 0 if instance is None else 1
        self.names = list(cell.parameters.parameters)[skip:]
        kinds = [p.kind for p in cell.parameters.parameters.values()]
        self._variadic = any(k in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for k in kinds)
        if self._variadic:
            raise TypeError(f"@dy.cell: {cell.name} must name its arguments; pass several expressions as a list")
        self._static = [n in cell.static for n in self.names]
        self.__name__ = cell.function.__name__
        self.__doc__ = cell.function.__doc__

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundCell:
        return BoundCell(self.cell, memo.get(id(self.instance), self.instance))

    def __reduce__(self) -> Any:
        return getattr, (self.instance, self.cell.attribute)

    def __repr__(self) -> str:
        return f"<cell {self.cell.name}>"

    def install(self, function: Callable[..., Any]) -> None:
        """Make ``function`` what a call of the cell reaches first: this object, or its recorder for the last trace.

        It lies in the instance's dictionary, where Python looks before it comes to the descriptor.
        """
        self.fastest = function
        if hasattr(self.instance, "__dict__"):
            self.instance.__dict__[self.cell.attribute] = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.names):
            args = self._positional(args, kwargs)
        if state.tracer is not None:
            own = () if self.instance is None else (self.instance,)
            return self.cell.function(*own, *args)
        graph = state.graph
        key: list[Any] = []
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
                ints[position] = checked_index(name, ints[position], size, what)
        if signature.equal_lists:
            _check_lengths(self.cell.name, signature, lists)
        index = graph.touch(signature)
        stream = graph.stream
        stream.extend((index, *vids))
        for elements in lists:
            stream.append(len(elements))
            stream.extend([e.vid for e in elements])
        if ints:
            stream.extend(ints)
        if floats:
            graph.floats.extend(floats)
        if signature.tail:
            append_tail(graph, signature)
        vid = graph.values
        count = variant.returns
        if not count:
            graph.values = vid + 1
            return Expression(graph, vid, signature.type)
        graph.values = vid + count
        return tuple([Expression(graph, vid + o, t) for o, t in enumerate(signature.types)])

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
        elif hasattr(arg, "__index__"):
            key.append(int)
            ints.append(int(arg))
        elif hasattr(arg, "__float__"):
            key.append(float)
            floats.append(float(arg))
        else:
            raise CellError(
                f"{user_line()}: cell {self.cell.name}: argument {name} is a {type(arg).__name__}, which is neither an "
                f'expression nor a number; declare it with @dy.cell(static=("{name}",)) if it is part of the structure'
            )
        return True

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
        calls = [self(*_lane(args, lane, lanes)) for lane in range(lanes)]
        graph = state.graph
        if isinstance(calls[0], tuple):
            joined = tuple(handle(graph, [c[o].vid for c in calls], calls[0][o].type) for o in range(len(calls[0])))
            graph.lanes.extend((calls[0][0].vid, lanes))
            return joined
        graph.lanes.extend((calls[0].vid, lanes))
        return handle(graph, [c.vid for c in calls], calls[0].type)

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def _find(self, key: tuple[Any, ...], args: tuple[Any, ...], graph: Graph) -> Variant:
        """The trace for these types whose guards hold; made on first sight."""
        try:
            variants = self.variants.setdefault(key, [])
        except TypeError:
            raise CellError(f"{user_line()}: cell {self.cell.name}: static arguments must be hashable") from None
        for variant in variants:
            if variant.holds():
                if config.debug:
                    self._compare(variant, args, graph)
                return variant
        variant = self._trace_checked(args, graph)
        variants.insert(0, variant)
        del variants[_MOST_VARIANTS:]
        recorder = specialized(self, variant, args)
        if recorder is not None and not config.debug:
            self.install(recorder)
        return variant

    def _compare(self, variant: Variant, args: tuple[Any, ...], graph: Graph) -> None:
        fresh = self._trace_checked(args, graph).signature
        known = variant.signature
        if fresh.program is not known.program or fresh.tail != known.tail or fresh.binding != known.binding:
            raise CellError(
                f"{user_line()}: cell {self.cell.name} does not do now what it did when it was traced: it depends on "
                f"something that is neither an argument nor an attribute of self"
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
                raise CellError(_COUNTED.format(line=user_line(), name=self.cell.name))
        return variant

    def _trace(self, args: tuple[Any, ...], graph: Graph, copies: int) -> Variant:
        tracer = CellTracer(self.cell.name, graph.dtype, copies)
        guards = Guards()
        symbolic = [self._symbol(tracer, s, n, a) for s, n, a in zip(self._static, self.names, args)]
        own = []
        if self.instance is not None:
            own.append(guards.stand_in(self.instance, guards.root(self.instance)))
        function = guards.instrument(self.cell.function)
        state.tracer = tracer
        state.graph = None  # type: ignore[assignment]
        try:
            result = function(*own, *symbolic)
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
            return Traced(tracer, tracer.arg(arg.type))
        if isinstance(arg, tuple):
            parts = [self._symbol(tracer, False, name, a) for a in arg]
            return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
        if isinstance(arg, list):
            return Ragged(tracer, tracer.list(arg[0].type)) if arg else []
        if hasattr(arg, "__index__"):
            return Payload(tracer, tracer.int(), "int", name)
        return Payload(tracer, tracer.float(), "float", name)

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


_RECORDER = """
def {name}({parameters}, *rest, **named):
    graph = state.graph
    try:
        fits = {condition}
    except (AttributeError, KeyError, IndexError, TypeError):
        fits = False
    if not fits:
        return slow(*[a for a in ({arguments},) if a is not missing], *rest, **named)
    place = signature.place
    graph.stream.extend(({record}))
    {floats}
    vid = graph.values
    graph.values = vid + {count}
    return {result}
"""


def specialized(bound: BoundCell, variant: Variant, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function that records calls like this one, with all checks of `BoundCell.__call__` written out in one place.

    It serves expressions and numbers (None where there is anything else), and leaves every other call to the cell.
    Recording is what a user's Python pays for each node: this takes a third of the general path's time.
    """
    signature = variant.signature
    if signature.tail or any(bound._static) or not all(type(a) in (Expression, int, float) for a in args) or not args:
        return None
    names = [f"a{i}" for i in range(len(args))]
    tests, vids, ints, floats = [], [], [], []
    namespace: dict[str, Any] = {
        **variant.guards.namespace,
        "Expression": Expression,
        "signature": signature,
        "slow": bound,
        "missing": object(),
        "state": state,
        "config": config,
    }
    limits = {position: size for position, size, _, _ in signature.bounds}
    for name, arg in zip(names, args):
        if type(arg) is Expression:
            namespace[f"t_{name}"] = arg.key
            tests.append(f"{name}.key is t_{name} and {name}.graph is graph")
            vids.append(f"{name}.vid")
        elif type(arg) is int:
            limit = limits.get(len(ints))
            tests.append(f"type({name}) is int" + (f" and 0 <= {name} < {limit}" if limit is not None else ""))
            ints.append(name)
        else:
            tests.append(f"type({name}) is float")
            floats.append(name)
    tests += ["graph is not None", "not rest", "not named", "not config.debug", variant.guards.condition]
    for o, t in enumerate(signature.types):
        namespace[f"out{o}"] = t
    made = [f"Expression(graph, vid + {o}, out{o})" for o in range(len(signature.types))]
    source = _RECORDER.format(
        name=bound.__name__,
        parameters=", ".join(f"{name}=missing" for name in names),
        arguments=", ".join(names),
        condition=" and ".join(tests),
        record=", ".join(["place[1] if place[0] == graph.serial else graph.touch(signature)", *vids, *ints]) + ",",
        floats=f"graph.floats.extend(({', '.join(floats)},))" if floats else "",
        count=len(made),
        result=f"({', '.join(made)},)" if variant.returns else made[0],
    )
    exec(compile(source, f"<recorder of {bound.cell.name}>", "exec"), namespace)
    recorder = namespace[bound.__name__]
    recorder.bound_cell = bound
    recorder.__doc__ = bound.__doc__
    return recorder


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
            uses are found by the trace. It returns an Expression or a tuple.
        static: names of arguments that are part of the structure; each value has a trace of its own.

    Raises:
        CellError: at a call, where the function reads a value, branches on a payload, uses an expression from
            outside, counts a list's elements, or returns one value for each of them.
    """
    names = (static,) if isinstance(static, str) else tuple(static)
    if function is None:
        return lambda f: Cell(f, names)
    return Cell(function, names)
