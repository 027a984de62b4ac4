"""The arc-hybrid transition system with its dynamic oracle: what a parser may do, and what a choice costs.

Marco Kuhlmann, Carlos Gómez-Rodríguez, Giorgio Satta: "Dynamic Programming Algorithms for Transition-Based Dependency
Parsers", ACL 2011, for the system; Yoav Goldberg, Joakim Nivre: "Training Deterministic Parsers with Non-Deterministic
Oracles", TACL 2013, for the oracle. Words are numbered from 1; 0, the root, stands behind the last one. Beyond the
papers, a tree has one word under the root: so says CoNLL-U. A sentence of n words takes 2 n transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHIFT, LEFT, RIGHT = range(3)
"""The transitions. With s the top of the stack and b the front of the buffer: SHIFT pushes b, LEFT makes b the head of
s and pops it, RIGHT makes what is beneath s its head and pops it."""


class Arc(NamedTuple):
    """The arc that was added last, and those before it."""

    dependent: int
    head: int
    label: int
    before: Arc | None


class Configuration:
    """Where a derivation stands. It never changes: a transition gives a new one, so that derivations can branch.

    Attributes:
        stack: words, the top last.
        front: the front of the buffer, which ends in words `front`, ..., `words` and the root.
        words: how many the sentence has.
        arcs: those added so far.
    """

    __slots__ = ("arcs", "front", "stack", "words")

    def __init__(self, words: int, stack: tuple[int, ...] = (), front: int = 1, arcs: Arc | None = None) -> None:
        self.words = words
        self.stack = stack
        self.front = front
        self.arcs = arcs

    @property
    def is_final(self) -> bool:
        """Whether every word has a head."""
        return self.front > self.words and not self.stack

    @property
    def front_word(self) -> int:
        """The word at the front, 0 for the root."""
        return self.front if self.front <= self.words else 0

    def legal(self) -> tuple[int, ...]:
        """The transitions that can be taken."""
        if self.front > self.words:  # the root is the front: the last word on the stack becomes the tree's
            return (RIGHT,) if len(self.stack) > 1 else (LEFT,)
        if len(self.stack) > 1:
            return (SHIFT, LEFT, RIGHT)
        return (SHIFT, LEFT) if self.stack else (SHIFT,)

    def head_by(self, transition: int) -> int:
        """The head that LEFT or RIGHT gives to the top of the stack."""
        return self.front_word if transition == LEFT else self.stack[-2]

    def take(self, transition: int, label: int = 0) -> Configuration:
        """What a legal transition leads to."""
        if transition == SHIFT:
            return Configuration(self.words, (*self.stack, self.front), self.front + 1, self.arcs)
        arc = Arc(self.stack[-1], self.head_by(transition), label, self.arcs)
        return Configuration(self.words, self.stack[:-1], self.front, arc)

    def tree(self) -> tuple[list[int], list[int]]:
        """Head and label of every word, for a final configuration."""
        heads, labels = [0] * self.words, [0] * self.words
        arc = self.arcs
        while arc is not None:
            heads[arc.dependent - 1] = arc.head
            labels[arc.dependent - 1] = arc.label
            arc = arc.before
        return heads, labels


class Oracle:
    """Says of each transition how many arcs of one tree it puts out of reach.

    Arguments:
        heads: the head of each word.
    """

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = [0, *heads]
        self.dependents: list[list[int]] = [[] for _ in self.heads]
        for word, head in enumerate(heads, start=1):
            self.dependents[head].append(word)

    def costs(self, c: Configuration) -> dict[int, int]:
        """The cost of each legal transition: arcs of the tree that could be had before, and cannot behind it.

        Goldberg and Nivre 2013, section 4.2. A word on the stack can get any word of the buffer for a head, or the one
        beneath it; a word of the buffer any other word of the buffer or the stack. The root, though, only a word that
        is or can come to be at the bottom of the stack.
        """
        return {transition: (self._shift, self._left, self._right)[transition](c) for transition in c.legal()}

    def _shift(self, c: Configuration) -> int:
        """The front gets no head within the stack but its top, and no dependent there."""
        front, stack = c.front, c.stack
        head = self.heads[front]
        lost = sum(self.heads[word] == front for word in stack)
        return lost + (bool(stack) if head == 0 else head in stack[:-1])

    def _left(self, c: Configuration) -> int:
        """The top gets no other head and no dependent."""
        top, head = c.stack[-1], self.heads[c.stack[-1]]
        if len(c.stack) > 1:
            lost = head == c.stack[-2] or head > c.front
        else:
            lost = head > c.front or (head == 0 and c.front <= c.words)
        return lost + self._dependents_in_buffer(top, c)

    def _right(self, c: Configuration) -> int:
        """The top gets no head in the buffer and no dependent."""
        top = c.stack[-1]
        return (self.heads[top] >= c.front) + self._dependents_in_buffer(top, c)

    def _dependents_in_buffer(self, word: int, c: Configuration) -> int:
        return sum(dependent >= c.front for dependent in self.dependents[word])


class Actions:
    """Transitions with labels, each with a number, by which a parser scores them: SHIFT, then all LEFT, then all RIGHT.

    Attributes:
        table: of each number the transition and the label.
        numbers: of each set of legal transitions the numbers, in order.
    """

    def __init__(self, labels: int) -> None:
        self.table = [(SHIFT, 0), *((transition, label) for transition in (LEFT, RIGHT) for label in range(labels))]
        sets = [(SHIFT,), (LEFT,), (RIGHT,), (SHIFT, LEFT), (SHIFT, LEFT, RIGHT)]
        self.numbers = {
            legal: np.array([number for number, (transition, _) in enumerate(self.table) if transition in legal])
            for legal in sets
        }

    def best(self, scores: np.ndarray, transitions: tuple[int, ...]) -> int:
        """The number of the best action with one of these transitions."""
        numbers = self.numbers[transitions]
        return int(numbers[scores[numbers].argmax()])

    def decide(self, scores: np.ndarray, c: Configuration, oracle: Oracle, labels: Sequence[int]) -> tuple[int, int]:
        """The best of the actions that cost nothing, given the tree's labels too, and the best of all legal ones."""
        costs = oracle.costs(c)
        right = []
        for transition in [t for t, cost in costs.items() if not cost]:
            if transition != SHIFT and c.head_by(transition) == oracle.heads[c.stack[-1]]:
                right.append(self.numbers[transition,][labels[c.stack[-1] - 1]])
            else:  # SHIFT, or an arc whose word cannot get its head any more: then any label will do
                right.append(self.best(scores, (transition,)))
        return int(max(right, key=scores.__getitem__)), self.best(scores, tuple(costs))


def is_projective(heads: Sequence[int]) -> bool:
    """Whether no two arcs of a tree cross, the root standing behind the last word: then it has a derivation."""
    oracle, c = Oracle(heads), Configuration(len(heads))
    while not c.is_final:
        transition = next((t for t, cost in oracle.costs(c).items() if not cost), None)
        if transition is None:
            return False
        c = c.take(transition)
    return c.tree()[0] == list(heads)
