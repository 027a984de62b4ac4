"""States of a recurrent network: persistent, so that any of them can be continued more than once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dynbatch import functions
from dynbatch.errors import DynbatchError, ShapeError, user_line
from dynbatch.graph import Expression, Operand
from dynbatch.graph import state as recording
from dynbatch.ops.record import as_expression

if TYPE_CHECKING:
    from dynbatch.rnn.builder import Layer, RNNBuilder

Vectors = tuple[Any, ...]
"""A layer's state, h last; the expressions are None where there is no state yet."""


class Run:
    """What the states of one sequence share: the layers they go through, and their dropout masks.

    Attributes:
        masks: for each layer; empty until the first input is added with dropout on, so that they have its batch size.
    """

    __slots__ = ("builder", "layers", "masks")

    def __init__(self, builder: RNNBuilder, layers: Sequence[Layer]) -> None:
        self.builder = builder
        self.layers = layers
        self.masks: list[tuple[Expression, ...]] = []

    def advance(self, before: Sequence[Vectors], x: Any) -> tuple[list[Vectors], Expression]:
        """One step of every layer: their new states, and the output."""
        if x.__class__ is not Expression and not isinstance(x, Operand):
            raise TypeError(f"{user_line()}: add_input: expected an Expression, not {type(x).__name__}")
        after = []
        if self.builder.rates is None:
            for layer, vectors in zip(self.layers, before):
                vectors = layer.step(x, *vectors)
                after.append(vectors)
                x = vectors[-1]
            return after, x
        for layer, vectors, dropped in zip(self.layers, before, self.builder.dropped(self, x)):
            vectors = layer.dropped_step(x, *vectors, *dropped)
            after.append(vectors)
            x = vectors[-1]
        return after, self.builder.dropped_output(x)

    def stale(self) -> bool:
        """Whether the masks are missing, or were drawn in a graph that has ended."""
        return not self.masks or self.masks[0][0].graph is not recording.graph


class RNNState:
    """What a builder's network has come to; `RNNBuilder.initial_state` gives the first one.

    Adding an input gives a new state and leaves this one as it is, so that states can branch.
    """

    __slots__ = ("_output", "_previous", "_run", "_vectors")

    def __init__(
        self, run: Run, vectors: Sequence[Vectors], output: Expression | None, previous: RNNState | None
    ) -> None:
        self._run = run
        self._vectors = vectors
        self._output = output
        self._previous = previous

    def __repr__(self) -> str:
        return f"<state of a {self._run.builder.whoami()}{'' if self._started else ', before its first input'}>"

    @property
    def _started(self) -> bool:
        return self._vectors[0][-1] is not None

    def add_input(self, x: Any) -> RNNState:
        """The state after one more input.

        Arguments:
            x: a vector of the builder's ``input_dim`` elements; with batch elements, the state has them too.

        Raises:
            ShapeError: another shape; names both, and the parameter.
        """
        vectors, output = self._run.advance(self._vectors, x)
        return RNNState(self._run, vectors, output, self)

    def add_inputs(self, xs: Iterable[Any]) -> list[RNNState]:
        """The states after each of the inputs, one by one; none for no inputs."""
        states = []
        state = self
        for x in xs:
            state = state.add_input(x)
            states.append(state)
        return states

    def transduce(self, xs: Iterable[Any]) -> list[Expression]:
        """The outputs after each of the inputs, one by one; none for no inputs."""
        outputs = []
        advance = self._run.advance
        vectors = self._vectors
        for x in xs:
            vectors, output = advance(vectors, x)
            outputs.append(output)
        return outputs

    def output(self) -> Expression:
        """The output: h of the last layer, of shape ``(hidden_dim,)``.

        Raises:
            DynbatchError: there is none yet, since no input was added and `initial_state` was given no vectors.
        """
        if self._output is None:
            raise DynbatchError(
                f"{user_line()}: output: this is the initial state of a {self._run.builder.whoami()}; it has no output "
                f"before an input is added (was the sequence empty?). Give initial_state(vecs) vectors to start from"
            )
        return self._output

    def h(self) -> tuple[Expression, ...]:
        """h of each layer, the last one being the output; empty where there is no state yet."""
        return tuple([vectors[-1] for vectors in self._vectors]) if self._started else ()

    def s(self) -> tuple[Expression, ...]:
        """Everything that the next step depends on: `h`, for an LSTM preceded by c of each layer.

        Empty where there is no state yet.
        """
        return tuple([v for kind in zip(*self._vectors) for v in kind]) if self._started else ()

    def prev(self) -> RNNState | None:
        """The state that the last input was added to; None for the initial one."""
        return self._previous

    def b(self) -> RNNBuilder:
        """The builder."""
        return self._run.builder

    def set_h(self, es: Sequence[Any]) -> RNNState:
        """This state with other h; c of an LSTM stays as it is (zeros where there is none yet).

        Arguments:
            es: one vector of shape ``(hidden_dim,)`` a layer.

        Raises:
            ShapeError: another number of vectors, or another shape.
        """
        layers = len(self._vectors)
        if len(es) != layers:
            raise ShapeError(f"{user_line()}: set_h: expected {layers} vectors, one a layer, not {len(es)}")
        hs = self._checked("set_h", es)
        return self._replaced([(*self._filled(vectors[:-1]), h) for vectors, h in zip(self._vectors, hs)])

    def set_s(self, es: Sequence[Any]) -> RNNState:
        """This state with other vectors, in the order of `s`.

        Arguments:
            es: vectors of shape ``(hidden_dim,)``: one a layer; for an LSTM c of each layer, and h of each layer
                behind them, unless h is to stay as it is (zeros where there is none yet).

        Raises:
            ShapeError: another number of vectors, or another shape.
        """
        layers, kinds = len(self._vectors), len(self._vectors[0])
        if len(es) not in (layers, layers * kinds):
            expected = f"{layers} or {layers * kinds} vectors (c, or c and h of each layer)"
            raise ShapeError(
                f"{user_line()}: set_s: expected {expected if kinds > 1 else f'{layers} vectors, one a layer'}, "
                f"not {len(es)}"
            )
        given = self._checked("set_s", es)
        columns = [given[start : start + layers] for start in range(0, len(given), layers)]
        return self._replaced(
            [(*new, *self._filled(old[len(new) :])) for old, new in zip(self._vectors, zip(*columns))]
        )

    def _replaced(self, vectors: list[Vectors]) -> RNNState:
        return RNNState(self._run, vectors, vectors[-1][-1], self)

    def _filled(self, vectors: Vectors) -> Vectors:
        """The vectors, with zeros for what there is not yet."""
        return tuple([functions.zeros(self._run.builder.hidden_dim) if v is None else v for v in vectors])

    def _checked(self, name: str, es: Sequence[Any]) -> list[Expression]:
        hidden = (self._run.builder.hidden_dim,)
        given = [as_expression(e) for e in es]
        for position, e in enumerate(given):
            if e.dim()[0] != hidden:
                raise ShapeError(
                    f"{user_line()}: {name}: expected vectors of shape {hidden}, not {e.dim()[0]} (position {position})"
                )
        return given
