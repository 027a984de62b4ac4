"""MV-RNN: the sentiment of every phrase, or the value of every part of an expression, by vectors and matrices.

Richard Socher, Brody Huval, Christopher Manning, Andrew Ng: "Semantic Compositionality through Recursive Matrix-Vector
Spaces", EMNLP 2012. Every node of a binary tree has a vector, what it means, and a matrix, what it does to the meaning
of its sibling. The data and the softmax are in `models/node_classifier.py`.
"""

from __future__ import annotations

import argparse
import sys
from typing import ClassVar

import numpy as np

import dynbatch as dy
from dynbatch.initializers import Initializer
from models import training
from models.node_classifier import NodeClassifier

NOISE = 0.01  # standard deviation

State = tuple[dy.Expression, dy.Expression]
"""The state (p, P) of a node: a vector of size `hidden`, and a square matrix."""


class MeanOfInputs(Initializer):
    """Of a matrix (n, k n): what takes the mean of k vectors, one above the other, plus Gaussian noise.

    With k = 1 that is the identity. The matrix of a phrase of any length then starts close to the identity too.
    """

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """The initial values; see `Initializer.values`."""
        rows, columns = shape[-2:]
        count = columns // rows
        return np.tile(np.eye(rows), count) / count + generator.normal(0.0, NOISE, shape)


class MVRNN:
    """The recursive matrix-vector network of sections 2.2 and 2.3."""

    def __init__(self, collection: dy.ParameterCollection, words: int, hidden: int) -> None:
        self.vectors = collection.add_lookup_parameters((words, hidden), name="vectors")
        self.matrices = collection.add_lookup_parameters((words, hidden, hidden), init=MeanOfInputs(), name="matrices")
        self.W = collection.add_parameters((hidden, 2 * hidden), init=MeanOfInputs(), name="W")
        self.W_M = collection.add_parameters((hidden, 2 * hidden), init=MeanOfInputs(), name="WM")

    @dy.cell
    def leaf(self, word: int) -> State:
        """The vector and the matrix of a word."""
        return self.vectors[word], self.matrices[word]

    @dy.cell
    def vector(self, a: dy.Expression, A: dy.Expression, b: dy.Expression, B: dy.Expression) -> dy.Expression:
        """p = g(W [B a; A b]): what each child means, as its sibling changes it."""
        return dy.tanh(self.W * dy.concatenate([B * a, A * b]))

    @dy.cell
    def compose(self, a: dy.Expression, A: dy.Expression, b: dy.Expression, B: dy.Expression) -> State:
        """The state of an inner node from those of its left and its right child; P = W_M [A; B]."""
        return self.vector(a, A, b, B), self.W_M * dy.concatenate([A, B])

    def inner(self, children: list[State]) -> State:
        """The state of an inner node from its children's states."""
        (a, A), (b, B) = children
        return self.compose(a, A, b, B)


class PhraseClassifier(NodeClassifier):
    """A class for every node of a tree: an MV-RNN under a softmax."""

    name = "mvrnn"
    demo: ClassVar = {"epochs": 8, "time_limit": 75.0}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        NodeClassifier.add_arguments(parser)
        parser.set_defaults(hidden=64)

    def make_encoder(self, collection: dy.ParameterCollection, words: int, args: argparse.Namespace) -> MVRNN:
        return MVRNN(collection, words, args.hidden)


if __name__ == "__main__":
    sys.exit(training.main(PhraseClassifier))
