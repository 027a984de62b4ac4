"""StackRNN: a shift-reduce parser whose stack is a recurrent network's state; each action is computed.

Chris Dyer, Miguel Ballesteros, Wang Ling, Austin Matthews, Noah Smith: "Transition-Based Dependency Parsing with Stack
Long Short-Term Memory", ACL 2015, with plain recurrent networks in the place of LSTMs, as in the ACRoBat paper (2023),
and with actions that build a tree of phrases: shift the next word, or join the two topmost parts under a label. What is
done next depends on scores that are read; under `dy.map` the sentences of a minibatch take their actions together.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.trees import Tree, binarized, read_trees

SHIFT = 0  # the number of an action; others are 1 + a label, and join under it
PARTIAL = 0  # the label of a phrase that has none, such as what `binarized` adds
Choose = Callable[[dy.Expression | None, int, int], int]
"""Which action comes next: from the scores of all, and the range of those that are possible."""

OPERATORS = ("+-", "*/", "^")  # weakest first
BRACKETS = 4


class Sentence(NamedTuple):
    """Words, and the tree over them; None where it is not known."""

    words: tuple[str, ...]
    tree: Tree | None


class Part(NamedTuple):
    """Of the stack: a vector for a word or a phrase, and the state of the stack's network with it on top."""

    vector: dy.Expression
    state: dy.Expression


def formulas(count: int, seed: int = 0) -> list[Tree]:
    """Formulas such as ``a + b * ( c - d ) ^ e``, without a word about which operator binds stronger.

    Their trees follow from it: ``^`` before ``*`` and ``/``, these before ``+`` and ``-``; ``^`` from the right, the
    others from the left. Labels are 1 to 3 for what an operator joins, weakest first, and `BRACKETS`.
    """
    random = np.random.default_rng(seed)

    def formula(variables: int, weakest: int) -> Tree:
        """Of so many variables; outside of brackets, no operator is weaker."""
        if variables == 1:
            return Tree(None, word=chr(ord("a") + int(random.integers(26))))
        strength = int(random.integers(weakest, 4))
        if strength == 3:
            return Tree(BRACKETS, children=(Tree(None, "("), formula(variables, 0), Tree(None, ")")))
        left, from_right = int(random.integers(1, variables)), strength == 2
        operator = Tree(None, word=str(random.choice(list(OPERATORS[strength]))))
        first, second = formula(left, strength + from_right), formula(variables - left, strength + 1 - from_right)
        return Tree(1 + strength, children=(first, operator, second))

    return [binarized(formula(int(random.integers(2, 16)), 0)) for _ in range(count)]


def words_of(tree: Tree) -> tuple[str, ...]:
    """From left to right."""
    return tuple(node.word for node in tree.nodes if node.word is not None)


def actions_of(tree: Tree) -> list[int]:
    """What builds a binary tree: its nodes in post-order."""
    return [SHIFT if node.word is not None else 1 + (node.label or PARTIAL) for node in tree.nodes]


def tree_of(words: Sequence[str], actions: Sequence[int]) -> Tree:
    """What actions build."""
    left, stack = iter(words), list[Tree]()
    for action in actions:
        if action == SHIFT:
            stack.append(Tree(None, word=next(left)))
        else:
            stack[-2:] = [Tree(action - 1, children=stack[-2:])]
    return stack[0]


def phrases(words: Sequence[str], actions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First word, end and label of every phrase that actions build."""
    starts, read = list[int](), 0
    for action in actions:
        if action == SHIFT:
            starts.append(read)
            read += 1
        else:
            starts.pop()
            yield starts[-1], read, action


class StackParser(training.Task):
    """Scores of the next action, from the states of three networks: of the stack, of the words to come, of the past."""

    name = "stackrnn"
    unit = "sentences"
    metric = "dev_f1"
    demo: ClassVar = {"hidden": 64, "epochs": 6, "time_limit": 60.0}

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list[Sentence], list[Sentence]]:
        sentences = [Sentence(words_of(tree), tree) for tree in formulas(2500)]
        return sentences[500:], sentences[:500]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Sentence]:
        if labels:
            return [Sentence(words_of(tree), tree) for tree in map(binarized, read_trees(path))]
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.split():
                raise FileFormatError(f"{path}, line {number}: a sentence needs a word")
        return [Sentence(tuple(line.split()), None) for line in lines]

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, train: list[Sentence]) -> dict:
        labels = {action for _, tree in train if tree is not None for action in actions_of(tree)}
        return {"words": sorted({word for words, _ in train for word in words}), "actions": 1 + max(labels)}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        n, actions = args.hidden, vocabulary["actions"]
        self.action_count = actions
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        self.words = collection.add_lookup_parameters((len(self.word_ids) + 1, n), name="words")
        self.actions = collection.add_lookup_parameters((actions, n), name="actions")
        self.empty = collection.add_lookup_parameters((3, n), name="empty")  # states before anything was put in

        def matrices(kind: str, names: str) -> list[dy.Parameter]:
            return [collection.add_parameters((n, n), name=kind + name) for name in names]

        def biases(names: str) -> list[dy.Parameter]:
            return [collection.add_parameters(n, init=0, name="b" + name) for name in names]

        # of the networks: stack (s), buffer (b) and actions (a)
        self.W_s, self.W_b, self.W_a = matrices("W", "sba")  # for the input
        self.V_s, self.V_b, self.V_a = matrices("V", "sba")  # for the state
        self.b_s, self.b_b, self.b_a = biases("sba")
        self.U_l, self.U_r, self.U_a = matrices("U", "lra")  # of a composition: left and right part, action
        self.P_s, self.P_b, self.P_a = matrices("P", "sba")  # of the parser's state
        self.b_u, self.b_p = biases("up")
        self.G = collection.add_parameters((actions, n), name="G")
        self.q = collection.add_parameters(actions, init=0, name="q")

    @dy.cell
    def before(self, word: int, b: dy.Expression) -> dy.Expression:
        """The state of the buffer with one more word, in front of those that it has."""
        return dy.tanh(dy.affine_transform([self.b_b, self.W_b, self.words[word], self.V_b, b]))

    def push(self, x: dy.Expression, s: dy.Expression) -> dy.Expression:
        """The state of the stack with a vector on top."""
        return dy.tanh(dy.affine_transform([self.b_s, self.W_s, x, self.V_s, s]))

    def remember(self, action: int, a: dy.Expression) -> dy.Expression:
        """The state of the past after an action."""
        return dy.tanh(dy.affine_transform([self.b_a, self.W_a, self.actions[action], self.V_a, a]))

    def scores(self, s: dy.Expression, b: dy.Expression, a: dy.Expression) -> dy.Expression:
        """The scores of all actions in a state of the parser."""
        p = dy.rectify(dy.affine_transform([self.b_p, self.P_s, s, self.P_b, b, self.P_a, a]))
        return dy.affine_transform([self.q, self.G, p])

    @dy.cell
    def shift(self, word: int, s: dy.Expression, b: dy.Expression, a: dy.Expression) -> tuple[dy.Expression, ...]:
        """The word's vector, the states of stack and past with it, and the next scores; ``b`` is without the word."""
        x = self.words[word]
        s, a = self.push(x, s), self.remember(SHIFT, a)
        return x, s, a, self.scores(s, b, a)

    @dy.cell
    def join(
        self,
        action: int,
        left: dy.Expression,
        right: dy.Expression,
        s: dy.Expression,
        b: dy.Expression,
        a: dy.Expression,
    ) -> tuple[dy.Expression, ...]:
        """The same of the phrase that an action makes of the two topmost parts; ``s`` is without them."""
        parts = [self.b_u, self.U_l, left, self.U_r, right, self.U_a, self.actions[action]]
        x = dy.tanh(dy.affine_transform(parts))
        s, a = self.push(x, s), self.remember(action, a)
        return x, s, a, self.scores(s, b, a)

    @dy.cell
    def action_loss(self, scores: dy.Expression, action: int) -> dy.Expression:
        return dy.pickneglogsoftmax(scores, action)

    def parse(self, words: Sequence[int], choose: Choose) -> tuple[list[int], list[dy.Expression]]:
        """The actions that are taken, and the losses of those where there was a choice."""
        s, b, a = (self.empty[k] for k in range(3))
        buffer = [b]  # states of the words to come, all of them last
        for word in reversed(words):
            buffer.append(self.before(word, buffer[-1]))
        bottom, stack, scores = s, list[Part](), None
        taken, losses = list[int](), list[dy.Expression]()
        while len(buffer) > 1 or len(stack) > 1:
            first, end = (SHIFT if len(buffer) > 1 else 1), (self.action_count if len(stack) > 1 else 1)
            action = choose(scores, first, end)
            if scores is not None and end - first > 1:
                losses.append(self.action_loss(scores, action))
            if action == SHIFT:
                word = words[len(words) + 1 - len(buffer)]
                buffer.pop()
                x, state, a, scores = self.shift(word, stack[-1].state if stack else bottom, buffer[-1], a)
            else:
                right, left = stack.pop(), stack.pop()
                below = stack[-1].state if stack else bottom
                x, state, a, scores = self.join(action, left.vector, right.vector, below, buffer[-1], a)
            stack.append(Part(x, state))
            taken.append(action)
        return taken, losses

    @staticmethod
    def best(scores: dy.Expression | None, first: int, end: int) -> int:
        """The action with the highest score of those that are possible."""
        if scores is None or end - first == 1:
            return first
        possible = scores.vec_value()[first:end]  # waits
        return first + possible.index(max(possible))

    @staticmethod
    def given(actions: Sequence[int]) -> Choose:
        """The actions that are given, one after the other; nothing is read."""
        following = iter(actions)
        return lambda scores, first, end: next(following)

    def ids(self, words: Sequence[str]) -> list[int]:
        return [self.word_ids.get(word, 0) for word in words]

    def loss(self, sentence: Sentence) -> dy.Expression:
        assert sentence.tree is not None
        _, losses = self.parse(self.ids(sentence.words), self.given(actions_of(sentence.tree)))
        return dy.esum(losses) if losses else dy.zeros(1)

    def length(self, sentence: Sentence) -> int:
        return len(sentence.words)

    def predict(self, sentences: list[Sentence]) -> list[list[int]]:
        return dy.map(lambda sentence: self.parse(self.ids(sentence.words), self.best)[0], sentences)

    def measure(self, sentences: list[Sentence], predictions: list[list[int]]) -> dict[str, float]:
        """F1 of labelled phrases, and the share of sentences without an error."""
        right = total = exact = 0
        for (words, tree), actions in zip(sentences, predictions):
            wanted = Counter(phrases(words, gold := actions_of(tree)))
            found = Counter(phrases(words, actions))
            right += (wanted & found).total()
            total += wanted.total() + found.total()
            exact += gold == actions
        return {"dev_f1": 2 * right / max(total, 1), "dev_exact": exact / len(sentences)}

    def write(self, sentences: list[Sentence], predictions: list[list[int]]) -> Iterator[str]:
        for (words, _), actions in zip(sentences, predictions):
            yield str(tree_of(words, actions))


if __name__ == "__main__":
    sys.exit(training.main(StackParser))
