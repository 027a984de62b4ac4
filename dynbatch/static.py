"""Static structures: what a function records for one argument is recorded once, and replayed by copying arrays.

A tree that is seen in every epoch builds the same nodes each time. `static` keeps them as a *tape*: the part of the
stream that the call appended, with the places that depend on where it is appended. A replay copies it, moves its
arguments by an offset, draws its random keys anew, and costs a few microseconds however many nodes it has.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from dynbatch.config import config
from dynbatch.errors import StaleExpressionError, StaticError, user_line
from dynbatch.graph import BatchedExpression, Expression, Graph, check_live, enter_phase, next_key, state
from dynbatch.random_stream import RandomStream
from dynbatch.words import Words

_VALUES = (int, float, str, bytes, bool, type(None))


class CacheInfo(NamedTuple):
    """Counts of a cache of tapes, as `functools.lru_cache` has them."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Tape:
    """What one call recorded.

    Arguments:
        graph: a graph of its own that the call was recorded into; its first values stand for the inputs.
        inputs: how many inputs there are.
        result: what the function returned, with expressions of that graph.
    """

    def __init__(self, graph: Graph, inputs: int, result: Any) -> None:
        self.inputs = inputs
        self.values = graph.values - inputs
        self.signatures = graph.signatures
        self.floats = graph.floats
        self.data = graph.data
        self.lanes = graph.lanes
        self.skips = graph.skips
        names = list(graph.phases)
        self.phases = [(v, names[k]) for v, k in zip(graph.phase_marks[::2], graph.phase_marks[1::2])]
        self.result = result
        graph.trim()
        self.size = graph.size
        self.words = graph.words
        self.moves = Words(self.size)  # one where a word is a value that moves with the tape
        self._signature_at: list[tuple[int, int]] = []  # places with what they hold: here a number of a signature
        self._input_at: list[tuple[int, int]] = []  # number of an input
        self._data_at: list[tuple[int, int]] = []  # offset in the tape's data
        self._key_at: list[int] = []
        self._find_places(graph.stream)
        self._indices = list(range(len(self.signatures)))

    def _find_places(self, stream: memoryview) -> None:
        """What depends on where the tape is appended."""
        p = 0
        while p < self.size:
            signature = self.signatures[stream[p]]
            args, lists, ints, _, _ = signature.program.layout
            self._signature_at.append((p, stream[p]))
            values = list(range(p + 1, p + 1 + args))
            p += 1 + args
            for _ in range(lists):
                length = stream[p]
                values += range(p + 1, p + 1 + length)
                p += 1 + length
            for at in values:
                if stream[at] < self.inputs:
                    self._input_at.append((at, stream[at]))
                else:
                    self.moves.at[at] = 1
            self._data_at += [(p + v.index, stream[p + v.index]) for v in signature.program.values if v.kind == "data"]
            tail = p + ints - len(signature.tail)
            self._key_at += [tail + i for i, item in enumerate(signature.tail) if item is None]
            p += ints

    def same_as(self, other: Tape) -> bool:
        """Whether another recording is the same but for its random keys."""
        mine, theirs = self._plain_words(), other._plain_words()
        equal = mine == theirs and self.floats == other.floats and self.data == other.data
        return equal and all(
            a.program is b.program and a.binding == b.binding for a, b in zip(self.signatures, other.signatures)
        )

    def _plain_words(self) -> list[int]:
        """What was recorded, without random keys and by the tape's own numbers of signatures."""
        words = list(memoryview(self.words.memory)[: self.size])
        for at, number in self._signature_at:
            words[at] = number
        for at in self._key_at:
            words[at] = 0
        return words

    def replay(self, graph: Graph, inputs: list[Expression]) -> Any:
        """Append the tape to a graph, and return what the function returned, as expressions of that graph."""
        base = graph.values - self.inputs
        self._take_indices(graph)
        start = graph.room_for(self.size)
        words = graph.words
        words.put_moved(start, self.words, self.moves, self.size, base)
        for at, number in self._input_at:
            words.at[start + at] = inputs[number].vid
        for at, offset in self._data_at:
            words.at[start + at] = offset + len(graph.data)
        for at in self._key_at:
            words.at[start + at] = next_key()
        graph.size = start + self.size
        if self.data:
            graph.data.extend(self.data)
        if self.floats:
            graph.floats.extend(self.floats)
        for i in range(0, len(self.lanes), 2):
            graph.lanes.extend((self.lanes[i] + base, self.lanes[i + 1]))
        for i in range(0, len(self.skips), 2):
            vid = self.skips[i]
            graph.skips.extend((inputs[vid].vid if vid < self.inputs else vid + base, self.skips[i + 1]))
        for vid, name in self.phases:
            graph.phase_marks.extend((vid + base, graph.phases.setdefault(name, len(graph.phases))))
        graph.values += self.values
        if self.phases:
            enter_phase(graph, state.phase)
        return _moved(self.result, graph, base, inputs)

    def _take_indices(self, graph: Graph) -> None:
        """Write the graph's own indices of the signatures; graphs mostly agree, so the last ones are kept."""
        indices = [graph.touch(s) for s in self.signatures]
        if indices != self._indices:
            self._indices = indices
            for at, number in self._signature_at:
                self.words.at[at] = indices[number]


def _moved(result: Any, graph: Graph, base: int, inputs: list[Expression]) -> Any:
    """A result of the tape as expressions of the graph."""
    if type(result) is Expression:
        return inputs[result.vid] if result.vid < len(inputs) else Expression(graph, result.vid + base, result.key)
    if isinstance(result, BatchedExpression):
        vids = [inputs[v].vid if v < len(inputs) else v + base for v in result.vids]
        return BatchedExpression(graph, vids, result.type)
    if isinstance(result, tuple):
        parts = [_moved(r, graph, base, inputs) for r in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    if isinstance(result, list):
        return [_moved(r, graph, base, inputs) for r in result]
    if isinstance(result, dict):
        return {k: _moved(r, graph, base, inputs) for k, r in result.items()}
    return result


class Static:
    """A function whose recordings are kept; see `static`."""

    def __init__(self, function: Callable[..., Any], key: Callable[..., Any] | None, maxsize: int) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__name__
        self._key = key
        self._maxsize = maxsize
        self._tapes: OrderedDict[Any, tuple[Tape, tuple[Any, ...]]] = OrderedDict()
        self._hits = self._misses = 0

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call: by replay, where one like it was recorded before."""
        if kwargs:
            raise TypeError(f"{user_line()}: {self.name}: a static function takes positional arguments only")
        if state.tracer is not None:
            return self.function(*args)
        graph = state.graph
        inputs: list[Expression] = []
        key = self._key_of(args, inputs, graph)
        found = self._tapes.get(key)
        if found is None:
            self._misses += 1
            found = self._tapes[key] = (self._record(args, graph), args)
            if len(self._tapes) > self._maxsize:
                self._tapes.popitem(last=False)
        else:
            self._hits += 1
            self._tapes.move_to_end(key)
            if config.debug and not found[0].same_as(self._record(args, graph)):
                raise StaticError(
                    f"{user_line()}: {self.name} does not record now what it recorded for this argument before; "
                    f"its structure may depend on its arguments only (key= can say on what)"
                )
        return found[0].replay(graph, inputs)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, the limit and the number of tapes kept."""
        return CacheInfo(self._hits, self._misses, self._maxsize, len(self._tapes))

    def cache_clear(self) -> None:
        """Forget all tapes."""
        self._tapes.clear()
        self._hits = self._misses = 0

    def _key_of(self, args: tuple[Any, ...], inputs: list[Expression], graph: Graph) -> Any:
        """What the recording depends on: types of expressions, values of plain arguments, identity of objects."""
        parts: list[Any] = [graph.dtype]
        structure = []
        for arg in args:
            if isinstance(arg, Expression):
                if type(arg) is not Expression:
                    raise StaticError(f"{user_line()}: {self.name}: an input cannot have batch elements")
                check_live(arg)
                parts.append(arg.key)
                inputs.append(arg)
            else:
                structure.append(arg)
        if self._key is not None:
            parts.append(self._key(*structure))
        else:
            parts += [(type(a), a) if isinstance(a, _VALUES) else id(a) for a in structure]
        return tuple(parts)

    def _record(self, args: tuple[Any, ...], outer: Graph) -> Tape:
        """Run the function into a graph of its own."""
        graph = Graph()
        graph.tape = self.name
        symbolic: list[Any] = []
        for arg in args:
            if isinstance(arg, Expression):
                arg = Expression(graph, graph.values, arg.type)
                graph.values += 1
            symbolic.append(arg)
        inputs = graph.values
        stream = state.stream
        state.graph = graph
        state.stream = RandomStream(0)  # it is the replays that draw: whether a tape was there must make no difference
        try:
            result = self.function(*symbolic)
        except StaleExpressionError as error:
            raise StaticError(
                f"{error} (while {self.name} was recorded: it may use its arguments and parameters only; "
                f"pass other expressions as arguments)"
            ) from None
        finally:
            state.graph, state.stream = outer, stream
            graph.live = False
        self._check(result, graph)
        return Tape(graph, inputs, result)

    def _check(self, result: Any, graph: Graph) -> None:
        if isinstance(result, Expression):
            if result.graph is not graph:
                raise StaticError(f"{user_line()}: {self.name} returns an expression that it did not make")
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._check(part, graph)
        elif isinstance(result, dict):
            self._check(tuple(result.values()), graph)


def static(
    function: Callable[..., Any] | None = None, *, key: Callable[..., Any] | None = None, maxsize: int = 100_000
) -> Any:
    """Record what a function builds once per argument, and replay it from then on.

    ```python
    @dy.static
    def tree_loss(tree):
        return dy.esum([loss(encode(node), node.label) for node in tree.nodes])
    ```

    For structures that come again, such as the trees of a training set in its second epoch. The function is called at
    the first sight of an argument; later calls copy what it recorded into the current graph, next to whatever else is
    recorded there. Parameters have their current values, and random ops draw anew.

    Arguments:
        function: takes positional arguments: expressions are inputs that may differ between calls; numbers, strings
            and None are structure, compared by value; any other object is structure, compared by identity (the cache
            keeps it alive; it must not be changed).
        key: computes what the structure depends on from the arguments that are not expressions, instead of their
            identity; must be hashable.
        maxsize: the most recordings kept; those not used for longest go first.

    The decorated function has ``cache_info()`` and ``cache_clear()``.

    Raises:
        StaticError: at the first call, where the function uses an expression that is no argument, or reads a value.
    """
    if maxsize < 1:
        raise ValueError(f"static: maxsize must be positive, not {maxsize}")
    if function is None:
        return lambda f: Static(f, key, maxsize)
    return Static(function, key, maxsize)
