"""Recorders: what a call of a traced cell reaches first.

It serves expressions, lists of them and numbers; every other call it leaves to the cell. With `recorder.pxd`, which
gives C types to what is here, it is compiled where there is a compiler (see `dynbatch.compiled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynbatch.config import config
from dynbatch.graph import Expression, Graph, state
from dynbatch.watch import Watch

if TYPE_CHECKING:
    from dynbatch.cell import BoundCell, Variant

_VALUE, _LIST, _INT, _FLOAT = range(4)
_LEAST, _END = -1 << 63, 1 << 63  # integer payload is stored in 64 bits


class Recorder:
    """Records calls like the one that was traced, after all checks that the cell itself makes.

    Attributes:
        bound_cell: the cell, for every other call.
        kinds: what each argument is; ``values``, ``lists``, ``ints`` and ``floats`` are the places of each kind.
        keys: the type of an expression or of a list's elements; (least, end) of an integer; None for a float.
        equal_lists: places of lists that must have one length.
        returns: 0 for one Expression, n for a tuple of n.
        dtype: of the graph, where no argument says it; else None.
        watch, rest, holds: what must be as it was in the trace; see `Guards`. ``rest`` is None where nothing is left.
    """

    def __init__(self, bound: BoundCell, variant: Variant, args: tuple[Any, ...]) -> None:
        signature = variant.signature
        self.bound_cell = bound
        self.slow = bound.record
        self.signature = signature
        self.returns = variant.returns
        self.types = signature.types
        self.watch = Watch((*variant.guards.facts, (config, "debug", False)))
        left = any(facts is None for facts in variant.guards.notes.values())
        self.rest = variant.guards.compile(but_facts=True) if left else None
        self.holds = variant.holds
        self.__name__ = bound.__name__
        self.__doc__ = bound.__doc__
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
        self.equal_lists = tuple([tuple([self.lists[k] for k in group]) for group in signature.equal_lists])
        self.dtype = None if _VALUE in kinds or _LIST in kinds else state.graph.dtype

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Record a call."""
        graph = state.graph
        if graph is None or named or not self._fits(args, graph) or not self._is_current():
            return self.slow(*args, **named)
        return self._record(args, graph)

    def __reduce__(self) -> Any:
        return self.bound_cell.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __repr__(self) -> str:
        return repr(self.bound_cell)

    def _is_current(self) -> bool:
        """Whether all that the trace read is as it was, and calls need not be compared with it."""
        if self.watch.unchanged():
            return self.rest is None or self.rest()
        return not config.debug and self.holds()

    def _fits(self, args: tuple[Any, ...], graph: Graph) -> bool:
        """Whether these are arguments like those that were traced, and the expressions of this graph."""
        if len(args) != self.count or (self.dtype is not None and self.dtype != graph.dtype):
            return False
        for i in range(self.count):
            arg = args[i]
            kind = self.kinds[i]
            if kind == _VALUE:
                if type(arg) is not Expression:
                    return False
                e = arg
                if e.key is not self.keys[i] or e.graph is not graph:
                    return False
            elif kind == _INT:
                if type(arg) is not int:
                    return False
                least, end = self.keys[i]
                if not least <= arg < end:
                    return False
            elif kind == _LIST:
                if type(arg) is not list or not arg:
                    return False
                for element in arg:
                    if type(element) is not Expression:
                        return False
                    e = element
                    if e.key is not self.keys[i] or e.graph is not graph:
                        return False
            elif type(arg) is not float:
                return False
        for group in self.equal_lists:
            length = len(args[group[0]])
            for i in group:
                if len(args[i]) != length:
                    return False
        return True

    def _record(self, args: tuple[Any, ...], graph: Graph) -> Any:
        """Record a call with arguments that fit."""
        count = len(self.values) + len(self.ints) + len(self.lists)
        for i in self.lists:
            count += len(args[i])
        at = graph.begin(self.signature, count)
        for i in self.values:
            e = args[i]
            graph.words.at[at] = e.vid
            at += 1
        for i in self.lists:
            graph.words.at[at] = len(args[i])
            at += 1
            for e in args[i]:
                graph.words.at[at] = e.vid
                at += 1
        for i in self.ints:
            graph.words.at[at] = args[i]
            at += 1
        if self.floats:
            graph.floats.extend([args[i] for i in self.floats])
        graph.size = at
        if not self.returns:
            return graph.add(self.types[0])
        return tuple([graph.add(key) for key in self.types])


def recorder_for(bound: BoundCell, variant: Variant, args: tuple[Any, ...]) -> Recorder | None:
    """A recorder of calls like this one; None where there is anything that it does not serve."""
    plain = all(
        type(a) in (Expression, int, float) or (type(a) is list and a and all(type(e) is Expression for e in a))
        for a in args
    )
    if variant.signature.tail or any(bound._static) or bound.cell.keyword_only or not plain or not args:
        return None
    return Recorder(bound, variant, args)
