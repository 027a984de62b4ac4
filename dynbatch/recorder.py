"""Recorders: what a call of a traced cell reaches first.

It serves expressions, lists of them and numbers; every other call it leaves to the cell. With `recorder.pxd`, which
gives C types to what is here, it is compiled where there is a compiler (see `dynbatch.compiled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynbatch.config import config
from dynbatch.graph import Expression, Graph, next_key, state
from dynbatch.watch import Watch

if TYPE_CHECKING:
    from dynbatch.cell import BoundCell, Variant

_VALUE, _LIST, _INT, _FLOAT = range(4)
_LEAST, _END = -1 << 63, 1 << 63  # integer payload is stored in 64 bits


class Recorder:
    """A cell on one object, as its user has it: records calls like the last one traced, and leaves others to the cell.

    Attributes:
        bound_cell: the cell.
        form: of the calls that are recorded here; None before the first trace.
    """

    def __init__(self, bound: BoundCell) -> None:
        self.bound_cell = bound
        self.form: Form | None = None
        self.__name__ = bound.__name__
        self.__doc__ = bound.__doc__
        self._slow = bound.record

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Record a call."""
        graph, form = state.graph, self.form  # both as they are now, whatever another thread traces meanwhile
        if form is None or graph is None or named or not form.fits(args, graph) or not form.is_current():
            return self._slow(*args, **named)
        return form.record(args, graph)

    def __reduce__(self) -> Any:
        return getattr, (self.bound_cell.instance, self.bound_cell.cell.attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self

    def __repr__(self) -> str:
        return f"<cell {self.bound_cell.cell.name}>"


class Form:
    """Calls like one that was traced, with all the checks that the cell makes of them.

    Attributes:
        count: how many arguments a call has.
        kinds: what each argument is; ``values``, ``lists``, ``ints`` and ``floats`` are the places of each kind.
        keys: the type of an expression or of a list's elements; (least, end) of an integer; None for a float.
        words: how many words a call takes, with those that the trace adds, without the elements of lists.
        equal_lists: places of lists that must have one length.
        returns: 0 for one Expression, n for a tuple of n.
        dtype: of the graph, where no argument says it; else None.
        watch, rest, holds: what must be as it was in the trace; see `Guards`. ``rest`` is None where nothing is left.
    """

    def __init__(self, variant: Variant, args: tuple[Any, ...]) -> None:
        signature = variant.signature
        self.signature = signature
        self.returns = variant.returns
        self.types = signature.types
        self.watch = Watch((*variant.guards.facts, (config, "debug", False)))
        left = any(facts is None for facts in variant.guards.notes.values())
        self.rest = variant.guards.compile(but_facts=True) if left else None
        self.holds = variant.holds
        ends: dict[int, int] = {}
        for position, size, _, _ in signature.bounds:
            ends[position] = min(size, ends.get(position, size))
        kinds: list[int] = []
        keys: list[Any] = []
        for arg in args:
            if type(arg) is Expression:
                kinds.append(_VALUE)
                keys.append(arg.key)
            elif type(arg) is list:
                kinds.append(_LIST)
                keys.append(arg[0].key)
            elif type(arg) is int:
                end = ends.get(kinds.count(_INT))
                kinds.append(_INT)
                keys.append((_LEAST, _END) if end is None else (0, end))
            else:
                kinds.append(_FLOAT)
                keys.append(None)
        self.kinds = bytes(kinds)
        self.keys = tuple(keys)
        self.count = len(args)
        self.values, self.lists, self.ints, self.floats = (
            tuple([i for i in range(len(args)) if kinds[i] == kind]) for kind in (_VALUE, _LIST, _INT, _FLOAT)
        )
        self.words = len(self.values) + len(self.lists) + len(self.ints) + len(signature.tail)
        self.equal_lists = tuple([tuple([self.lists[k] for k in group]) for group in signature.equal_lists])
        self.dtype = None if _VALUE in kinds or _LIST in kinds else state.graph.dtype

    def is_current(self) -> bool:
        """Whether all that the trace read is as it was, and calls need not be compared with it."""
        if self.watch.unchanged():
            return self.rest is None or self.rest()
        return not config.debug and self.holds()

    def fits(self, args: tuple[Any, ...], graph: Graph) -> bool:
        """Whether these are arguments like those that were traced, and the expressions of this graph."""
        if len(args) != self.count or (self.dtype is not None and self.dtype != graph.dtype):
            return False
        kinds, keys = self.kinds, self.keys
        for i in range(self.count):
            arg = args[i]
            kind = kinds[i]
            if kind == _VALUE:
                if type(arg) is not Expression:
                    return False
                e = arg
                if e.key is not keys[i] or e.graph is not graph:
                    return False
            elif kind == _INT:
                if type(arg) is not int:
                    return False
                least, end = keys[i]
                if not least <= arg < end:
                    return False
            elif kind == _LIST:
                if type(arg) is not list or not arg:
                    return False
                for element in arg:
                    if type(element) is not Expression:
                        return False
                    e = element
                    if e.key is not keys[i] or e.graph is not graph:
                        return False
            elif type(arg) is not float:
                return False
        for group in self.equal_lists:
            length = len(args[group[0]])
            for i in group:
                if len(args[i]) != length:
                    return False
        return True

    def record(self, args: tuple[Any, ...], graph: Graph) -> Any:
        """Record a call with arguments that fit."""
        count = self.words
        for i in self.lists:
            count += len(args[i])
        at = graph.begin(self.signature, count)
        words = graph.words.at
        for i in self.values:
            e = args[i]
            words[at] = e.vid
            at += 1
        for i in self.lists:
            words[at] = len(args[i])
            at += 1
            for e in args[i]:
                words[at] = e.vid
                at += 1
        for i in self.ints:
            words[at] = args[i]
            at += 1
        for item in self.signature.tail:
            words[at] = next_key() if item is None else item
            at += 1
        if self.floats:
            graph.floats.extend([args[i] for i in self.floats])
        graph.size = at
        if not self.returns:
            return graph.add(self.types[0])
        return tuple([graph.add(key) for key in self.types])


def form_of(bound: BoundCell, variant: Variant, args: tuple[Any, ...]) -> Form | None:
    """The form of a call that was traced; None where it has anything that no form is for."""
    plain = all(
        type(a) in (Expression, int, float) or (type(a) is list and a and all(type(e) is Expression for e in a))
        for a in args
    )
    if any(bound._static) or bound.cell.keyword_only or not plain or not args:
        return None
    return Form(variant, args)
