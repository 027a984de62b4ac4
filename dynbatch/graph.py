"""Recording: the graph is an append-only stream of integers, and an Expression is a handle on one value in it.

Python without NumPy, since this runs once for every op that a user calls; with `graph.pxd`, which gives C types to what
is here, it is compiled where there is a compiler (see `dynbatch.compiled`). A node is recorded as
``[signature, arguments..., (length, elements...) for each list, integer payloads...]`` in `Graph.stream`; floats go to
`Graph.floats`. Where a node starts and what its parts mean follows from its signature, so that nothing else needs to
be written. Everything about running is in `dynbatch.batching` and `dynbatch.cpu`.

A manually batched expression (DyNet's batch dimension) is one ordinary node for each batch element, recorded
together: broadcasting is a repeated argument, picking an element costs nothing, and automatic batching sees through.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dynbatch.config import config
from dynbatch.errors import CellError, MapError, StaleExpressionError, user_line
from dynbatch.signature import Signature
from dynbatch.words import Words

if TYPE_CHECKING:
    import numpy as np

    from dynbatch.types import Type

_ROOM = 1024  # words that a graph has room for at first


class State(threading.local):
    """What a thread is recording into: its graph, and the trace of the cell that is being traced, if any.

    The first four hold for one instance of a `dynbatch.map`, and change as another goes on.
    """

    def __init__(self) -> None:
        self.keep = True  # whether plans keep what backward reads: not within no_grad
        self.strategy: str | None = None  # within `autobatch`, else the configured one
        self.phase = ""
        self.stream: Any = None  # of random keys; None for the process's own
        self.fiber: Any = None  # the instance that is running, within a map
        self.tracer: Any = None
        self.last_map: Any = None
        self.last_plans: dict[str, Any] = {}
        self.graph = Graph()

    @property
    def settings(self) -> tuple[bool, str | None, str, Any]:
        """What holds within ``with`` blocks."""
        return self.keep, self.strategy, self.phase, self.stream

    @settings.setter
    def settings(self, found: tuple[bool, str | None, str, Any]) -> None:
        self.keep, self.strategy, self.phase, self.stream = found
        enter_phase(self.graph, self.phase)


class Graph:
    """Everything recorded since `renew_cg`, and where its values lie once they are computed.

    A node is recorded in three steps, the last of which makes it count: `begin` makes room and writes the signature,
    the caller writes the node's words behind it, and `end` takes them over. `record` is all three for words in a list.

    Attributes:
        live: False once the graph was renewed; its expressions are then refused.
        words: memory for the recorded integers; there is ``room`` for as many, and ``size`` of them are recorded.
        floats: float payloads, in recording order.
        data: values given by the user (`inputTensor`), flat; an integer payload holds the offset.
        values: how many values were recorded; the next value's id.
        signatures: the signatures used, by their index in the stream.
        mark: an object of this graph's own; see `Signature.place`.
        lanes: (first value, count) of nodes recorded together as one manual batch.
        phases, phase_marks: numbers of the phases by name, and (first value, phase) wherever another phase begins.
        skips: (value, operations) of `dynbatch.align`.
        random: what the random streams of this graph come from; None until there is one.
        tape: name of the static function whose recording this graph holds, if any; nothing runs in it.
        execution: the backend's state for this graph; None until something runs.
    """

    def __init__(self) -> None:
        self.mark = object()
        self.live = True
        self.words = Words(_ROOM)
        self.room = _ROOM
        self.size = 0
        self.floats = array("d")
        self.data = array("f" if config.dtype == "float32" else "d")
        self.dtype = config.dtype
        self.values = 0
        self.signatures: list[Signature] = []
        self.lanes = array("q")
        self.constants: dict[Any, Expression] = {}
        self._indices: dict[int, int] = {}
        self.phases: dict[str, int] = {"": 0}
        self.phase_marks = array("q")
        self.skips = array("q")
        self.random: Any = None
        self.tape = ""
        self.execution: Any = None

    @property
    def stream(self) -> memoryview:
        """The recorded integers. What is recorded later may lie elsewhere in memory."""
        return memoryview(self.words.memory)[: self.size]

    def touch(self, signature: Signature) -> int:
        """This graph's index of the signature, which is added on first use (and kept alive by the graph)."""
        index = self._indices.get(id(signature))
        if index is None:
            index = len(self.signatures)
            self.signatures.append(signature)
            self._indices[id(signature)] = index
        signature.place = (self.mark, index)
        return index

    def begin(self, signature: Signature, count: int) -> int:
        """Make room for a node of ``count`` words behind its signature; returns where in `words` they go."""
        at = self.size
        if at + count >= self.room:
            self.room_for(count + 1)
        place = signature.place
        self.words.at[at] = place[1] if place[0] is self.mark else self.touch(signature)
        return at + 1

    def end(self, at: int, key: Type) -> Expression:
        """A node with one output is complete, its words end at ``at``; returns the handle on its value."""
        self.size = at
        return self.add(key)

    def add(self, key: Type) -> Expression:
        """The handle on the next value, which is an output of the node recorded last."""
        made = Expression.__new__(Expression)
        made.graph = self
        made.vid = self.values
        made.key = key
        self.values += 1
        return made

    def record(self, signature: Signature, words: list[int]) -> None:
        """Record a node of these words, and of those that its trace adds: literals, and random keys drawn now.

        Its outputs are then added one by one.
        """
        tail = signature.tail
        at = self.begin(signature, len(words) + len(tail))
        for word in words:
            self.words.at[at] = word
            at += 1
        for item in tail:
            self.words.at[at] = next_key() if item is None else item
            at += 1
        self.size = at

    def room_for(self, count: int) -> int:
        """Make room for as many words behind what is recorded; returns where they go."""
        end = self.size + count
        if end > self.room:
            self._move(max(end, 2 * self.room))
        return self.size

    def trim(self) -> None:
        """Give up the room that is not used: nothing more will be recorded."""
        self._move(self.size)

    def _move(self, room: int) -> None:
        """Move the words to a place with this much room. Whoever looks at the old place keeps what is there."""
        words = Words(room)
        memoryview(words.memory)[: self.size] = self.stream
        self.words = words
        self.room = room


def next_key() -> int:
    """A fresh random key, as a signed 64-bit integer: the next of the stream that this is recorded in.

    Assigned at recording, so that neither the strategy nor recomputation changes what is drawn.
    """
    return config.next_key() if state.stream is None else state.stream.next_key()


def renew_cg() -> None:
    """Start a new graph; expressions of the old one cannot be used any more. Memory is kept for reuse.

    Raises:
        MapError: within an instance of a `map`, whose other instances use the graph.
    """
    old = state.graph
    if state.fiber is not None:
        raise MapError(
            f"{user_line()}: renew_cg() within an instance of dy.map would end the graph of all its instances; "
            f"call it before or after the map"
        )
    if state.tracer is not None:
        raise CellError(f"{user_line()}: cell {state.tracer.name} calls renew_cg(), which is not for use in a cell")
    old.live = False
    if old.execution is not None:
        state.last_plans = {"forward": old.execution.last, "backward": old.execution.last_backward}
        old.execution.release()
        old.execution = None
    state.graph = Graph()
    enter_phase(state.graph, state.phase)


def enter_phase(graph: Graph, name: str) -> None:
    """What is recorded from here on belongs to this phase."""
    marks = graph.phase_marks
    number = graph.phases.setdefault(name, len(graph.phases))
    if number != (marks[len(marks) - 1] if marks else 0):  # compiled, indices do not count from the end
        marks.extend((graph.values, number))


class Operand:
    """What ops take: an `Expression` or a parameter. Has the operators.

    ``*`` and ``@`` are the matrix product between operands, and ``*`` scales by a number; ``+`` and ``-``
    broadcast as DyNet does, aligned at the left; ``/`` divides elementwise; ``[]`` picks along the first dimension.
    Comparisons with numbers read the value.

    Every operand has a ``type``, the shape and dtype of its value; a ``graph``, which is None for a parameter; and a
    ``key``, see `Expression`.
    """

    __slots__ = ()

    __array_ufunc__ = None  # so that a NumPy number on the left leaves the operator to the Operand
    is_parameter = False
    is_lookup = False

    def __add__(self, other: Any) -> Expression:
        return arithmetic.plus(self, other)

    def __radd__(self, other: Any) -> Expression:
        return arithmetic.plus(other, self)

    def __sub__(self, other: Any) -> Expression:
        return arithmetic.minus(self, other)

    def __rsub__(self, other: Any) -> Expression:
        return arithmetic.minus(other, self)

    def __mul__(self, other: Any) -> Expression:
        return arithmetic.times(self, other)

    def __rmul__(self, other: Any) -> Expression:
        return arithmetic.times(other, self)

    def __matmul__(self, other: Any) -> Expression:
        return arithmetic.matrix_product(self, other)

    def __truediv__(self, other: Any) -> Expression:
        return arithmetic.divide(self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return arithmetic.divide(other, self)

    def __pow__(self, other: Any) -> Expression:
        return arithmetic.pow(self, other)

    def __neg__(self) -> Expression:
        return arithmetic.negate(self)

    def __getitem__(self, index: Any) -> Expression:
        return shapes.get_item(self, index)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "an Expression has no truth value: read its value first, e.g. `if e.value() > 0:` or `if e > 0:` for a "
            "scalar"
        )

    def __len__(self: Any) -> int:
        return self.type.shape[0]

    def __lt__(self, other: float) -> bool:
        return float(self) < _number(other)

    def __le__(self, other: float) -> bool:
        return float(self) <= _number(other)

    def __gt__(self, other: float) -> bool:
        return float(self) > _number(other)

    def __ge__(self, other: float) -> bool:
        return float(self) >= _number(other)

    def __eq__(self, other: object) -> bool:
        if hasattr(other, "__float__") and not isinstance(other, Operand):
            return float(self) == float(other)
        return self is other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __float__(self) -> float:
        return self.scalar_value()

    def dim(self: Any) -> tuple[tuple[int, ...], int]:
        """(shape, number of batch elements)."""
        return self.type.shape, 1

    def npvalue(self, recalculate: bool = False) -> np.ndarray:
        """The value as a NumPy array in the user's shape, batch elements along an added last dimension."""
        raise NotImplementedError

    def value(self, recalculate: bool = False) -> Any:
        """The value: a float for a scalar, a list of floats for a vector, else a NumPy array."""
        array = self.npvalue()
        if array.size == 1:
            return float(array.reshape(-1)[0])
        return array.tolist() if array.ndim == 1 else array

    def scalar_value(self, recalculate: bool = False) -> float:
        """The value of a scalar as a float; ValueError for anything larger."""
        array = self.npvalue()
        if array.size != 1:
            raise ValueError(f"scalar_value: the expression has shape {array.shape}, not one element")
        return float(array.reshape(-1)[0])

    def vec_value(self, recalculate: bool = False) -> list[float]:
        """All elements as a flat list of floats, in column-major order."""
        array = self.npvalue()
        found: list[float] = array.tolist() if array.ndim == 1 else array.reshape(-1, order="F").tolist()
        return found

    def argmax_value(self) -> Any:
        """Index of the largest element (the first, if several), in column-major order; a list for a batch."""
        array, batch = self.npvalue(), self.dim()[1]
        if batch == 1:
            return int(array.argmax() if array.ndim == 1 else array.reshape(-1, order="F").argmax())
        return [int(i) for i in array.reshape(-1, batch, order="F").argmax(0)]


def _number(x: Any) -> float:
    if isinstance(x, (int, float)) or hasattr(x, "__float__"):
        return float(x)
    raise TypeError(f"an Expression can be compared with a number, not with {type(x).__name__}")


class Expression(Operand):
    """A handle on one recorded value.

    ``key`` is what the op tables are searched by: the value's type; handles that need more than the fast path
    (batched ones, and those inside a trace) have a key of their own, which no table holds.
    """

    __slots__ = ("graph", "key", "vid")

    graph: Graph
    vid: int

    def __init__(self, graph: Graph, vid: int, key: Any) -> None:
        self.graph = graph
        self.vid = vid
        self.key = key

    @property
    def type(self) -> Type:
        """Shape and dtype of the value."""
        return self.key

    @property
    def vids(self) -> Sequence[int]:
        """Ids of the values: one, or one for each batch element."""
        return (self.vid,)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Expression is a handle in its graph, and cannot be copied or pickled: read its value")

    def __repr__(self) -> str:
        shape, batch = self.dim()
        return f"<Expression {shape}{f' x {batch}' if batch > 1 else ''}, value {self.vid}>"

    def npvalue(self, recalculate: bool = False) -> np.ndarray:
        """The value as a NumPy array in the user's shape; runs what it needs and does not have yet.

        Raises:
            StaleExpressionError: the graph was renewed since.
        """
        from dynbatch.batching.run import values

        return values(self)

    def forward(self, recalculate: bool = False) -> Any:
        """Compute the value now, and return it as `value` does."""
        return self.value()

    def backward(self, full: bool = False) -> None:
        """Add the gradients of this scalar to those of the parameters.

        Arguments:
            full: keep gradients of inner expressions too, for `gradient`.

        Raises:
            BackwardError: not a scalar, or parameters changed since the value was computed.
        """
        from dynbatch.batching.run import backward

        backward(self, full)

    def gradient(self) -> np.ndarray:
        """Gradient of the last loss with respect to this expression; needs ``loss.backward(full=True)``."""
        from dynbatch.batching.run import gradient

        return gradient(self)


class BatchedExpression(Expression):
    """An expression with batch elements: one value for each, all of one type."""

    __slots__ = ("_type", "_vids")

    def __init__(self, graph: Graph, vids: Sequence[int], type: Type) -> None:
        super().__init__(graph, vids[0], object())
        self._vids = vids
        self._type = type

    @property
    def type(self) -> Type:
        """Shape and dtype of one element."""
        return self._type

    @property
    def vids(self) -> Sequence[int]:
        """Ids of the elements' values."""
        return self._vids

    def dim(self) -> tuple[tuple[int, ...], int]:
        """(shape, number of batch elements)."""
        return self._type.shape, len(self._vids)


def handle(graph: Graph, vids: Sequence[int], type: Type) -> Expression:
    """An expression of these values: plain for one, batched for several."""
    return Expression(graph, vids[0], type) if len(vids) == 1 else BatchedExpression(graph, vids, type)


def check_live(expression: Expression) -> None:
    """Raise `StaleExpressionError` if the expression's graph was renewed or is another thread's."""
    graph = expression.graph
    if state.tracer is not None or graph is None:
        where = "within the cell" if state.tracer is not None else "outside of the cell"
        raise CellError(
            f"{user_line()}: an expression from outside of a cell, or from its trace, is used {where}; pass it as an "
            f"argument, or return it"
        )
    if not graph.live:
        raise StaleExpressionError(
            f"{user_line()}: this expression belongs to a graph that renew_cg() has ended; "
            f"build it again after renew_cg()"
        )
    if graph is not state.graph:
        raise StaleExpressionError(f"{user_line()}: expressions of two graphs (of two threads) cannot be mixed")


state = State()

from dynbatch.functions import arithmetic, shapes  # noqa: E402  the operators need these, which need what is above
