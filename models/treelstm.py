"""TreeLSTM: the sentiment of every phrase of a sentence, or the value of every part of a ListOps expression.

Kai Sheng Tai, Richard Socher, Christopher Manning: "Improved Semantic Representations From Tree-Structured Long
Short-Term Memory Networks", ACL 2015; numbers in parentheses are its equations. The model is written for one tree, as
in the paper. Nothing in it says how trees are batched: the calls of a cell that can run together do, across the trees
of a minibatch. The data and the softmax are in `models/node_classifier.py`, flags, training loop and saving in
`models/training.py`.
"""

from __future__ import annotations

import argparse
import sys
from typing import ClassVar

import dynbatch as dy
from models import training
from models.node_classifier import NodeClassifier

State = tuple[dy.Expression, dy.Expression]
"""The state (h, c) of a node: two vectors of size `hidden`."""


class TreeLSTM:
    """What both variants share: a word's vector, of size `hidden` too, is the input of a leaf."""

    def __init__(self, collection: dy.ParameterCollection, words: int, hidden: int) -> None:
        self.collection = collection
        self.hidden = hidden
        self.embeddings = collection.add_lookup_parameters((words, hidden), name="embeddings")
        self.W_i, self.W_o, self.W_u = self.matrices("W", "iou")
        self.b_i, self.b_o, self.b_u = self.biases("iou")

    def matrices(self, kind: str, gates: str) -> list[dy.Parameter]:
        """A square matrix per gate."""
        return [self.collection.add_parameters((self.hidden, self.hidden), name=kind + gate) for gate in gates]

    def biases(self, gates: str) -> list[dy.Parameter]:
        """A bias per gate."""
        return [self.collection.add_parameters(self.hidden, init=0, name="b" + gate) for gate in gates]

    @dy.cell
    def leaf(self, word: int) -> State:
        """The state of a leaf: that of an inner node without children, its input the word's vector."""
        x = dy.lookup(self.embeddings, word)
        i = dy.logistic(dy.affine_transform([self.b_i, self.W_i, x]))
        o = dy.logistic(dy.affine_transform([self.b_o, self.W_o, x]))
        u = dy.tanh(dy.affine_transform([self.b_u, self.W_u, x]))
        c = dy.cmult(i, u)
        h = dy.cmult(o, dy.tanh(c))
        return h, c


class BinaryTreeLSTM(TreeLSTM):
    """The N-ary TreeLSTM of section 3.2 with N = 2: every gate has a matrix for each child."""

    def __init__(self, collection: dy.ParameterCollection, words: int, hidden: int) -> None:
        super().__init__(collection, words, hidden)
        self.L_i, self.L_o, self.L_u, self.L_f, self.L_g = self.matrices("L", "ioufg")  # for the left child's h
        self.R_i, self.R_o, self.R_u, self.R_f, self.R_g = self.matrices("R", "ioufg")  # for the right child's h
        self.b_f, self.b_g = self.biases("fg")

    @dy.cell
    def compose(self, h_l: dy.Expression, c_l: dy.Expression, h_r: dy.Expression, c_r: dy.Expression) -> State:
        """The state of an inner node from those of its left and its right child."""
        i = dy.logistic(dy.affine_transform([self.b_i, self.L_i, h_l, self.R_i, h_r]))  # (9)
        f = dy.logistic(dy.affine_transform([self.b_f, self.L_f, h_l, self.R_f, h_r]))  # (10), what stays of c_l
        g = dy.logistic(dy.affine_transform([self.b_g, self.L_g, h_l, self.R_g, h_r]))  # (10), what stays of c_r
        o = dy.logistic(dy.affine_transform([self.b_o, self.L_o, h_l, self.R_o, h_r]))  # (11)
        u = dy.tanh(dy.affine_transform([self.b_u, self.L_u, h_l, self.R_u, h_r]))  # (12)
        c = dy.cmult(i, u) + dy.cmult(f, c_l) + dy.cmult(g, c_r)  # (13)
        h = dy.cmult(o, dy.tanh(c))  # (14)
        return h, c

    def inner(self, children: list[State]) -> State:
        """The state of an inner node from its children's states."""
        (h_l, c_l), (h_r, c_r) = children
        return self.compose(h_l, c_l, h_r, c_r)


class ChildSumTreeLSTM(TreeLSTM):
    """The Child-Sum TreeLSTM of section 3.1: any number of children, whose order does not matter."""

    def __init__(self, collection: dy.ParameterCollection, words: int, hidden: int) -> None:
        super().__init__(collection, words, hidden)
        self.U_i, self.U_o, self.U_u, self.U_f = self.matrices("U", "iouf")
        (self.b_f,) = self.biases("f")

    @dy.cell
    def compose(self, hs: list[dy.Expression], cs: list[dy.Expression]) -> State:
        """The state of an inner node from the lists of its children's h and c."""
        h_sum = dy.esum(hs)  # (2)
        i = dy.logistic(dy.affine_transform([self.b_i, self.U_i, h_sum]))  # (3)
        fs = [dy.logistic(dy.affine_transform([self.b_f, self.U_f, h])) for h in hs]  # (4), what stays of each c
        o = dy.logistic(dy.affine_transform([self.b_o, self.U_o, h_sum]))  # (5)
        u = dy.tanh(dy.affine_transform([self.b_u, self.U_u, h_sum]))  # (6)
        c = dy.cmult(i, u) + dy.esum([dy.cmult(f, c) for f, c in zip(fs, cs)])  # (7)
        h = dy.cmult(o, dy.tanh(c))  # (8)
        return h, c

    def inner(self, children: list[State]) -> State:
        """The state of an inner node from its children's states."""
        return self.compose([h for h, _ in children], [c for _, c in children])


class TreeClassifier(NodeClassifier):
    """A class for every node of a tree: a TreeLSTM under a softmax."""

    name = "treelstm"
    shape_flags = ("hidden", "cell")
    demo: ClassVar = {"hidden": 64, "learning_rate": 0.05, "epochs": 8, "time_limit": 75.0}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        NodeClassifier.add_arguments(parser)
        parser.add_argument(
            "--cell", choices=("binary", "childsum"), default="binary", help="which TreeLSTM (default: %(default)s)"
        )

    @classmethod
    def is_binary(cls, args: argparse.Namespace) -> bool:
        return args.cell == "binary"

    def make_encoder(self, collection: dy.ParameterCollection, words: int, args: argparse.Namespace) -> TreeLSTM:
        return (BinaryTreeLSTM if self.is_binary(args) else ChildSumTreeLSTM)(collection, words, args.hidden)


if __name__ == "__main__":
    sys.exit(training.main(TreeClassifier))
