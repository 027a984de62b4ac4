"""What the tree models share: trees as data, and a class for every node by a softmax over the node's vector."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Protocol

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.trees import Tree, binarized, listops, read_trees

State = tuple[dy.Expression, dy.Expression]
"""What a model computes for a node, first of all the vector that is classified."""


class Encoder(Protocol):
    """A recursive network: the state of a node from its word, or from the states of its children."""

    def leaf(self, word: int) -> State:
        """The state of a leaf, from the number of its word."""

    def inner(self, children: list[State]) -> State:
        """The state of an inner node from its children's states."""


class NodeClassifier(training.Task):
    """A class for every node of a tree: an encoder under a softmax. A subclass says which encoder."""

    unit = "trees"
    metric = "dev_accuracy"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dropout",
            type=float,
            default=0.0,
            metavar="RATE",
            help="of the vectors under the softmax (default: %(default)s)",
        )

    @classmethod
    def is_binary(cls, args: argparse.Namespace) -> bool:
        """Whether inner nodes must have two children."""
        return True

    def make_encoder(self, collection: dy.ParameterCollection, words: int, args: argparse.Namespace) -> Any:
        """The `Encoder`, its parameters added to ``collection``; ``words`` is how many numbers a word can have."""
        raise NotImplementedError

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list[Tree], list[Tree]]:
        trees = listops(5000, binary=cls.is_binary(args))
        return trees[500:], trees[:500]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Tree]:
        trees = read_trees(path, labels)
        for number, tree in enumerate(trees, start=1):
            if labels and tree.label is None:
                raise FileFormatError(f"{path}: the root of tree {number} has no label")
        return [binarized(tree) for tree in trees] if cls.is_binary(args) else trees

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, trees: list[Tree]) -> dict:
        words = {node.word for tree in trees for node in tree.nodes if node.word is not None}
        classes = 1 + max(node.label for tree in trees for node in tree.nodes if node.label is not None)
        return {"words": sorted(words), "classes": classes}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        self.encoder = self.make_encoder(collection, len(self.word_ids) + 1, args)
        self.W_s = collection.add_parameters((vocabulary["classes"], args.hidden), name="Ws")
        self.b_s = collection.add_parameters(vocabulary["classes"], init=0, name="bs")
        self.dropout = args.dropout

    def encode(self, tree: Tree) -> list[dy.Expression]:
        """The vector of every node of the tree, in the order of `tree.nodes`: children first, the root last."""
        outputs = []
        waiting: list[State] = []  # states of the finished subtrees that wait for their parent
        for node in tree.nodes:
            if node.word is not None:
                state = self.encoder.leaf(self.word_ids.get(node.word, 0))
            else:
                count = len(node.children)
                state = self.encoder.inner(waiting[-count:])
                del waiting[-count:]
            waiting.append(state)
            outputs.append(state[0])
        return outputs

    @dy.cell
    def scores(self, h: dy.Expression) -> dy.Expression:
        return dy.affine_transform([self.b_s, self.W_s, h])

    @dy.cell
    def node_loss(self, h: dy.Expression, label: int) -> dy.Expression:
        if self.dropout:
            h = dy.dropout(h, self.dropout)
        return dy.pickneglogsoftmax(self.scores(h), label)

    def loss(self, tree: Tree) -> dy.Expression:
        nodes = zip(tree.nodes, self.encode(tree))
        return dy.esum([self.node_loss(h, node.label) for node, h in nodes if node.label is not None])

    def predict(self, trees: list[Tree]) -> list[int]:
        roots = [self.scores(self.encode(tree)[-1]) for tree in trees]
        dy.forward(roots)
        return [int(root.argmax_value()) for root in roots]

    def measure(self, trees: list[Tree], predictions: list[int]) -> dict[str, float]:
        correct = sum(tree.label == label for tree, label in zip(trees, predictions))
        return {"dev_accuracy": correct / len(trees)}
