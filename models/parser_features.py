"""What a transition-based parser decides from: two ways to score the actions that it can take.

Eliyahu Kiperwasser, Yoav Goldberg: "Simple and Accurate Dependency Parsing Using Bidirectional LSTM Feature
Representations", TACL 2016. Chris Dyer, Miguel Ballesteros, Wang Ling, Austin Matthews, Noah Smith: "Transition-Based
Dependency Parsing with Stack Long Short-Term Memory", ACL 2015.

Both have three methods. ``begin`` takes the vectors of a sentence's words, the root's last, and gives what there is to
remember before the first transition. ``scores`` is of what is remembered and the configuration; ``after`` is what is
remembered after an action.
"""

from __future__ import annotations

from typing import NamedTuple

import dynbatch as dy
from models.arc_hybrid import LEFT, SHIFT, Configuration

WordParts = tuple[dy.Expression, ...]
"""What a word adds to the hidden layer in each place that it can have."""

ACTION_SIZE = 32
"""Of the vectors of actions and relations: little has to be said of them, and each transition reads one of each."""

State = tuple[dy.Expression, dy.Expression]
"""c and h of an LSTM."""


class BiLSTMFeatures:
    """Kiperwasser and Goldberg: scores from the three topmost words of the stack and the front of the buffer.

    Each word is a vector v of a BiLSTM, so that it knows the whole sentence. Of ``W [v_s2; v_s1; v_s0; v_b]`` the four
    parts are computed once a word, not once a transition.
    """

    def __init__(self, collection: dy.ParameterCollection, inputs: int, hidden: int, actions: int) -> None:
        self.bilstm = dy.BiRNNBuilder(2, inputs, 2 * hidden, collection, dy.VanillaLSTMBuilder)
        self.W_s2, self.W_s1, self.W_s0, self.W_b = (
            collection.add_parameters((hidden, 2 * hidden), name=f"W_{slot}") for slot in ("s2", "s1", "s0", "b")
        )
        self.absent = collection.add_lookup_parameters((3, hidden), name="absent")  # parts where the stack is shorter
        self.bias = collection.add_parameters(hidden, init=0, name="bias")
        self.W_2 = collection.add_parameters((actions, hidden), name="W_2")
        self.b_2 = collection.add_parameters(actions, init=0, name="b_2")

    @dy.cell
    def parts(self, v: dy.Expression) -> WordParts:
        """What a word adds to the hidden layer as s2, s1, s0 and b."""
        return self.W_s2 * v, self.W_s1 * v, self.W_s0 * v, self.W_b * v

    @dy.cell
    def score(self, s2: dy.Expression, s1: dy.Expression, s0: dy.Expression, b: dy.Expression) -> dy.Expression:
        return dy.affine_transform([self.b_2, self.W_2, dy.tanh(s2 + s1 + s0 + b + self.bias)])

    def begin(self, xs: list[dy.Expression]) -> list[WordParts]:
        """The parts of every word, the root's first; those of no word last."""
        *words, root = map(self.parts, self.bilstm.transduce(xs))
        memory = [root, *words, tuple(self.absent[k] for k in range(3))]
        dy.wait(*[parts[0] for parts in memory])  # of every word, once and for all: a cell computes all that it returns
        return memory

    def scores(self, memory: list[WordParts], c: Configuration) -> dy.Expression:
        s2, s1, s0 = (-1, -1, -1, *c.stack)[-3:]
        return self.score(memory[s2][0], memory[s1][1], memory[s0][2], memory[c.front_word][3])

    def after(self, memory: list[WordParts], transition: int, action: int) -> list[WordParts]:
        return memory


class Element(NamedTuple):
    """The top of a stack of vectors that an LSTM has read from the bottom.

    It never changes, and what is popped stays with whoever else has it.
    """

    vector: dy.Expression | None  # None at the bottom
    state: State
    beneath: Element | None


class Reading(NamedTuple):
    """What `StackLSTMFeatures` remember of a derivation."""

    stack: Element
    buffer: Element
    history: State


class StackLSTMFeatures:
    """Dyer et al.: scores from LSTMs that have read the stack, the buffer and the actions so far.

    A state of an LSTM is a value, so popping means going on from an earlier one. A word with its dependents is one
    vector, composed as they are attached. All that an action changes is computed in one cell.
    """

    def __init__(self, collection: dy.ParameterCollection, inputs: int, hidden: int, actions: int) -> None:
        self.stack, self.buffer = (dy.VanillaLSTMBuilder(1, hidden, hidden, collection) for _ in range(2))
        self.history = dy.VanillaLSTMBuilder(1, ACTION_SIZE, hidden, collection)
        self.bottoms = collection.add_lookup_parameters((2, hidden), name="bottoms")  # what the first two read first
        self.start = collection.add_lookup_parameters((1, ACTION_SIZE), name="start")  # and the third
        self.actions = collection.add_lookup_parameters((actions, ACTION_SIZE), name="actions")
        self.relations = collection.add_lookup_parameters((actions, ACTION_SIZE), name="relations")
        self.V = collection.add_parameters((hidden, inputs), name="V")
        self.b = collection.add_parameters(hidden, init=0, name="b")
        self.U_h, self.U_d = (collection.add_parameters((hidden, hidden), name=f"U_{k}") for k in "hd")
        self.U_r = collection.add_parameters((hidden, ACTION_SIZE), name="U_r")
        self.e = collection.add_parameters(hidden, init=0, name="e")
        self.W_s, self.W_b, self.W_a = (collection.add_parameters((hidden, hidden), name=f"W_{k}") for k in "sba")
        self.d = collection.add_parameters(hidden, init=0, name="d")
        self.G = collection.add_parameters((actions, hidden), name="G")
        self.q = collection.add_parameters(actions, init=0, name="q")

    def composed(self, head: dy.Expression, dependent: dy.Expression, action: int) -> dy.Expression:
        """The head's vector with one more dependent; the action says by which relation, and on which side."""
        r = self.relations[action]
        return dy.tanh(dy.affine_transform([self.e, self.U_h, head, self.U_d, dependent, self.U_r, r]))  # section 3.4

    @dy.cell
    def read_word(self, x: dy.Expression, buffer: State) -> tuple[dy.Expression, ...]:
        """The word's vector, and the buffer with it at the front."""
        vector = dy.rectify(dy.affine_transform([self.b, self.V, x]))  # section 3.3
        return vector, *read(self.buffer, buffer, vector)

    @dy.cell
    def shift(self, word: dy.Expression, stack: State, history: State, action: int) -> tuple[dy.Expression, ...]:
        return *read(self.stack, stack, word), *read(self.history, history, self.actions[action])

    @dy.cell
    def left(
        self, head: dy.Expression, dependent: dy.Expression, buffer: State, history: State, action: int
    ) -> tuple[dy.Expression, ...]:
        vector = self.composed(head, dependent, action)
        return vector, *read(self.buffer, buffer, vector), *read(self.history, history, self.actions[action])

    @dy.cell
    def right(
        self, head: dy.Expression, dependent: dy.Expression, stack: State, history: State, action: int
    ) -> tuple[dy.Expression, ...]:
        vector = self.composed(head, dependent, action)
        return vector, *read(self.stack, stack, vector), *read(self.history, history, self.actions[action])

    @dy.cell
    def score(self, s: dy.Expression, b: dy.Expression, a: dy.Expression) -> dy.Expression:
        p = dy.rectify(dy.affine_transform([self.d, self.W_s, s, self.W_b, b, self.W_a, a]))  # (1)
        return dy.affine_transform([self.q, self.G, p])

    def begin(self, xs: list[dy.Expression]) -> Reading:
        """An empty stack, and a buffer that was read from its end."""
        stack, buffer = (
            Element(None, lstm.initial_state().add_input(self.bottoms[k]).s(), None)
            for k, lstm in enumerate((self.stack, self.buffer))
        )
        for x in reversed(xs):
            vector, *state = self.read_word(x, buffer.state)
            buffer = Element(vector, tuple(state), buffer)
        return Reading(stack, buffer, self.history.initial_state().add_input(self.start[0]).s())

    def scores(self, reading: Reading, c: Configuration) -> dy.Expression:
        stack, buffer, (_, a) = reading
        return self.score(stack.state[1], buffer.state[1], a)

    def after(self, reading: Reading, transition: int, action: int) -> Reading:
        stack, buffer, history = reading
        if transition == SHIFT:
            *state, c, h = self.shift(buffer.vector, stack.state, history, action)
            return Reading(Element(buffer.vector, tuple(state), stack), buffer.beneath, (c, h))
        if transition == LEFT:
            vector, *state, c, h = self.left(buffer.vector, stack.vector, buffer.beneath.state, history, action)
            return Reading(stack.beneath, Element(vector, tuple(state), buffer.beneath), (c, h))
        head = stack.beneath
        vector, *state, c, h = self.right(head.vector, stack.vector, head.beneath.state, history, action)
        return Reading(Element(vector, tuple(state), head.beneath), buffer, (c, h))


def read(lstm: dy.VanillaLSTMBuilder, state: State, x: dy.Expression) -> State:
    """The state of an LSTM after one more input."""
    return lstm.initial_state(state).add_input(x).s()
