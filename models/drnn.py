"""DRNN: a tree that grows from its root, by what a sentence says; whether a node has children is computed.

David Alvarez-Melis, Tommi Jaakkola: "Tree-structured Decoding with Doubly-Recurrent Neural Networks", ICLR 2017,
section 3. A node's state comes from its parent's (ancestral) and from its previous sibling's (fraternal). Growing reads
values at every node; under `dy.map` the trees of a minibatch grow together, and so do the children of a node, once all
of these are known: a map within the map.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training

DEEPEST, WIDEST = 8, 8  # of a tree that the model decides on: levels, and children of a node
SURE = 100  # in log-odds
START = 0  # in the place of a label: what is above the root, and before a first child


class Node(NamedTuple):
    """A labelled node, and what is below."""

    label: str
    children: tuple[Node, ...] = ()

    def __str__(self) -> str:
        return f"({self.label} {' '.join(map(str, self.children))})" if self.children else self.label

    def paths(self, above: tuple = ()) -> Iterator[tuple]:
        """Of every node: its label and place, and those of all nodes above it."""
        yield (here := (*above, self.label))
        for number, child in enumerate(self.children):
            yield from child.paths((*here, number))


class Instance(NamedTuple):
    """A sentence, and the tree that is to grow from it; None where it is not known."""

    words: tuple[str, ...]
    tree: Node | None


def plants(count: int, seed: int = 0, lowest: int = 2) -> list[Instance]:
    """Sentences of four words that describe a tree, all different: "p7 high4 step2 twist1".

    The root is ``p7``, and 4 levels grow. A node p has 1 + (p + twist) % 3 children, one ``step`` after the other from
    p on (of 16); what 4 divides has none. At most 1,024, of ``lowest`` levels to three more.
    """

    def grown(label: int, levels: int, step: int, twist: int, is_root: bool) -> Node:
        children: list[Node] = []
        if levels > 1 and (is_root or label % 4):
            labels = [(label + step * k) % 16 for k in range(1, 2 + (label + twist) % 3)]
            children = [grown(child, levels - 1, step, twist, False) for child in labels]
        return Node(f"p{label}", tuple(children))

    found = []
    for number in np.random.default_rng(seed).permutation(1024)[:count].tolist():
        label, levels, step, twist = number % 16, lowest + number // 16 % 4, 1 + number // 64 % 4, number // 256
        words = (f"p{label}", f"high{levels}", f"step{step}", f"twist{twist}")
        found.append(Instance(words, grown(label, levels, step, twist, True)))
    return found


def read_instances(path: Path, labels: bool = True) -> list[Instance]:
    """One instance a line: the words, a tab, and the tree, such as ``(a b (c d))``, a node before its children.

    Raises:
        FileFormatError: no words, or no tree where one is needed; names the line.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text, _, tree = line.partition("\t")
        try:
            if not text.split():
                raise ValueError("a line needs words, and behind a tab a tree")
            found.append(Instance(tuple(text.split()), read_tree(tree) if labels else None))
        except ValueError as error:
            raise FileFormatError(f"{path}, line {number}: {error}") from None
    return found


def read_tree(text: str) -> Node:
    """The tree in brackets; a ValueError says what is wrong with it."""
    open_nodes: list[list] = [[]]  # label and children of the nodes around; first the list that the root goes to
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            open_nodes.append([])
        elif token != ")":
            open_nodes[-1].append(token if len(open_nodes[-1]) == 0 and len(open_nodes) > 1 else Node(token))
        elif len(open_nodes) > 1 and open_nodes[-1] and isinstance(open_nodes[-1][0], str):
            label, *children = open_nodes.pop()
            open_nodes[-1].append(Node(label, tuple(children)))
        else:
            raise ValueError("a ')' without a label before it")
    if len(open_nodes) > 1 or len(open_nodes[0]) != 1:
        raise ValueError(f"expected one tree such as (a b (c d)), not {text!r}")
    return open_nodes[0][0]


Prediction = tuple[dy.Expression, dy.Expression, dy.Expression]
"""A state (c and h), and what is said of a node there: the log-odds that it has children, the log-odds that a sibling
follows, and the scores of its labels, as one vector."""


class Decisions:
    """What the children of one node are to be: here what the model finds most probable.

    Arguments:
        depth: the level of these children; the root is the only node at level 1.

    Attributes:
        each: calls a function for each child, as `dy.map` does.
    """

    each = staticmethod(dy.map)

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def shift(self, k: int) -> tuple[int, int]:
        """What is added, to decide, to the log-odds that child ``k`` has children, and that a sibling follows."""
        return (0 if self.depth < DEEPEST else -SURE), (0 if self.depth > 1 and k + 1 < WIDEST else -SURE)

    def take(self, k: int, said: dy.Expression, a: int, f: int) -> tuple[bool, bool, int]:
        """Whether child ``k`` has children, whether a sibling follows, and its label; see `Prediction`, and `shift`."""
        children, sibling, *scores = said.vec_value()  # waits
        return children + a >= 0, sibling + f >= 0, scores.index(max(scores))

    def below(self, k: int) -> Decisions:
        """The decisions on the children of child ``k``."""
        return Decisions(self.depth + 1)


class Given(Decisions):
    """The children are those of a tree that is known, its labels by number; no value is read."""

    each = staticmethod(lambda function, items: [function(item) for item in items])

    def __init__(self, row: Sequence[Node], label_ids: dict[str, int]) -> None:
        self.row = row
        self.label_ids = label_ids

    def shift(self, k: int) -> tuple[int, int]:
        return (SURE if self.row[k].children else -SURE), (SURE if k + 1 < len(self.row) else -SURE)

    def take(self, k: int, said: dy.Expression, a: int, f: int) -> tuple[bool, bool, int]:
        return bool(self.row[k].children), k + 1 < len(self.row), self.label_ids.get(self.row[k].label, START)

    def below(self, k: int) -> Decisions:
        return type(self)(self.row[k].children, self.label_ids)


def is_positive(x: dy.Expression) -> dy.Expression:
    """1 where a scalar is at least zero, else 0, without a gradient."""
    return dy.argmax(dy.concatenate([x, x * 0]))[:1]


class TreeGrower(training.Task):
    """An LSTM reads the sentence, a doubly-recurrent network grows the tree."""

    name = "drnn"
    unit = "trees"
    metric = "dev_f1"
    demo: ClassVar = {"hidden": 64, "learning_rate": 0.05, "epochs": 20, "time_limit": 60.0}

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list[Instance], list[Instance]]:
        instances = plants(1024)
        return instances[128:], instances[:128]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Instance]:
        return read_instances(path, labels)

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, train: list[Instance]) -> dict:
        def labels(node: Node) -> Iterator[str]:
            yield node.label
            for child in node.children:
                yield from labels(child)

        words = {word for instance in train for word in instance.words}
        return {"words": sorted(words), "labels": sorted({x for _, tree in train if tree for x in labels(tree)})}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        hidden, self.label_names = args.hidden, ["", *vocabulary["labels"]]  # none: `START`
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        self.label_ids = {label: number for number, label in enumerate(self.label_names)}
        self.words = collection.add_lookup_parameters((len(self.word_ids) + 1, hidden), name="words")
        self.labels = collection.add_lookup_parameters((len(self.label_names), hidden), name="labels")
        self.encoder = dy.VanillaLSTMBuilder(1, hidden, hidden, collection)
        self.ancestral = dy.VanillaLSTMBuilder(1, hidden, hidden, collection)  # the paper's g^a
        self.fraternal = dy.VanillaLSTMBuilder(1, hidden, hidden, collection)  # g^f
        self.U_a, self.U_f = (collection.add_parameters((hidden, hidden), name=name) for name in ("Ua", "Uf"))
        self.u = collection.add_parameters((2, hidden), name="u")  # rows u^a and u^f
        self.W = collection.add_parameters((len(self.label_names), hidden), name="W")
        self.v_a, self.v_f = (collection.add_parameters(len(self.label_names), name=name) for name in ("va", "vf"))

    @dy.cell
    def first_child(
        self, c: dy.Expression, h: dy.Expression, label: int, h_f: dy.Expression, a: int, f: int
    ) -> Prediction:
        """The prediction of a node's first child from the node's state and label, and h_f of all first children."""
        c, h_a = self.ancestral.initial_state([c, h]).add_input(self.labels[label]).s()  # h_a = g^a(h_a, x)
        return c, h_a, self.node(h_a, h_f, a, f)

    @dy.cell
    def next_sibling(
        self, c: dy.Expression, h: dy.Expression, label: int, h_a: dy.Expression, a: int, f: int
    ) -> Prediction:
        """The prediction of the next sibling from a node's state and label, and h_a of all siblings."""
        c, h_f = self.fraternal.initial_state([c, h]).add_input(self.labels[label]).s()  # h_f = g^f(h_f, x)
        return c, h_f, self.node(h_a, h_f, a, f)

    def node(self, h_a: dy.Expression, h_f: dy.Expression, a: int, f: int) -> dy.Expression:
        """What is said of a node (see `Prediction`), where ``a`` and ``f`` are added to decide on the topology."""
        h = dy.tanh(self.U_f * h_f + self.U_a * h_a)
        log_odds = self.u * h
        has_children, has_sibling = is_positive(log_odds[:1] + a), is_positive(log_odds[1:] + f)
        scores = self.W * h + self.v_a * has_children + self.v_f * has_sibling
        return dy.concatenate([log_odds, scores])

    @dy.cell
    def node_loss(self, said: dy.Expression, has_children: int, has_sibling: int, label: int) -> dy.Expression:
        """Cross-entropy of the topology and of the label; see `Prediction`."""
        children = dy.log_sigmoid(said[:1] * (2 * has_children - 1))
        sibling = dy.log_sigmoid(said[1:2] * (2 * has_sibling - 1))
        return dy.pickneglogsoftmax(said[2:], label) - children - sibling

    def grow(
        self, parent: Sequence[dy.Expression], above: int, eldest: Sequence[dy.Expression], decisions: Decisions
    ) -> tuple[tuple[Node, ...], list[dy.Expression]]:
        """The children of a node with all that is below them, and the losses of all these nodes.

        Arguments:
            parent, above: the node's ancestral state (c and h), and its label.
            eldest: the fraternal state of a first child.
            decisions: what the children are to be.
        """
        labels: list[int] = []
        growing, losses = [], []
        shift = decisions.shift(0)
        *ancestor, said = self.first_child(*parent, above, eldest[1], *shift)
        sibling = eldest
        while True:
            grows, more, label = decisions.take(k := len(labels), said, *shift)
            losses.append(self.node_loss(said, int(grows), int(more), label))
            labels.append(label)
            if grows:
                growing.append(k)
            if not more:
                break
            shift = decisions.shift(k + 1)
            *sibling, said = self.next_sibling(*sibling, label, ancestor[1], *shift)

        def below(k: int) -> tuple[tuple[Node, ...], list[dy.Expression]]:
            return self.grow(ancestor, labels[k], eldest, decisions.below(k))

        each = decisions.each if len(growing) > 1 else map  # one needs no map of its own
        grown = dict(zip(growing, each(below, growing)))
        nodes = [Node(self.label_names[label], grown[k][0] if k in grown else ()) for k, label in enumerate(labels)]
        return tuple(nodes), [*losses, *(loss for _, inner in grown.values() for loss in inner)]

    def root(self, words: Sequence[int], decisions: Decisions) -> tuple[tuple[Node, ...], list[dy.Expression]]:
        """The tree that grows from a sentence, as the only child of nothing; see `grow`."""
        state = self.encoder.initial_state().add_inputs([self.words[word] for word in words])[-1]
        eldest = self.fraternal.initial_state().add_input(self.labels[START])
        return self.grow(state.s(), START, eldest.s(), decisions)

    def ids(self, words: Sequence[str]) -> list[int]:
        return [self.word_ids.get(word, 0) for word in words]

    def loss(self, instance: Instance) -> dy.Expression:
        assert instance.tree is not None
        return dy.esum(self.root(self.ids(instance.words), Given([instance.tree], self.label_ids))[1])

    def tree(self, instance: Instance) -> Node:
        """The tree that grows from an instance's words."""
        return self.root(self.ids(instance.words), Decisions())[0][0]

    def predict(self, instances: list[Instance]) -> list[Node]:
        return dy.map(self.tree, instances)

    def measure(self, instances: list[Instance], predictions: list[Node]) -> dict[str, float]:
        """F1 of nodes, which are right where all above them are too, and the share of trees that are right."""
        right = total = exact = 0
        for (_, tree), found in zip(instances, predictions):
            wanted, grown = Counter(tree.paths()), Counter(found.paths())
            right += (wanted & grown).total()
            total += wanted.total() + grown.total()
            exact += tree == found
        return {"dev_f1": 2 * right / total, "dev_exact": exact / len(instances)}


if __name__ == "__main__":
    sys.exit(training.main(TreeGrower))
