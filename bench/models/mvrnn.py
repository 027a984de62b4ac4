"""The MV-RNN of `models.mvrnn`, with the loss at the root, in each of the systems.

Instances are those of `bench.trees`. No system computes the matrix of a root, which nothing reads.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import trees
from bench.models import Program, own_programs, with_weights, without_cells

UNIT = trees.UNIT
NOISE = 0.1  # of words' matrices, on top of the identity: about the norm of what it adds to a vector of norm 1
load = trees.load

Weights = dict[str, np.ndarray]


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names that `models.mvrnn` has for them, of a size that keeps vectors and matrices alike at all depths."""

    def draw(*shape: int, norm: float = 1.0) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(norm / np.sqrt(shape[-1]))

    return {
        "vectors": draw(sizes["words"], hidden),
        "matrices": draw(sizes["words"], hidden, hidden, norm=NOISE) + np.eye(hidden, dtype=np.float32),
        "W": draw(hidden, 2 * hidden),
        "W_M": draw(hidden, 2 * hidden),
        "W_s": draw(sizes["classes"], hidden),
        "b_s": draw(sizes["classes"]),
    }


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Four square products with vectors at an inner node, and two of matrices unless it is the root; the classifier."""
    inner = trees.leaf_count(instance[0]) - 1
    return 2.0 * (4 * inner * hidden**2 + 2 * max(inner - 1, 0) * hidden**3 + sizes["classes"] * hidden)


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    """Parameters with their values, the function from an instance to its loss, and the collection."""
    import dynbatch as dy
    from models.mvrnn import PhraseClassifier

    collection = dy.ParameterCollection()
    words, hidden = weights["vectors"].shape
    vocabulary = {"words": range(1, words), "classes": len(weights["b_s"])}
    task = PhraseClassifier(collection, Namespace(hidden=hidden, dropout=0.0), vocabulary)
    encoder = task.encoder
    if not cells:
        without_cells(task, encoder)
    leaf, vector, compose, node_loss = encoder.leaf, encoder.vector, encoder.compose, task.node_loss

    def encode(tree):
        return leaf(tree) if type(tree) is int else compose(*encode(tree[0]), *encode(tree[1]))

    def tree_loss(instance):
        tree, label = instance
        p = leaf(tree)[0] if type(tree) is int else vector(*encode(tree[0]), *encode(tree[1]))
        return node_loss(p, label)

    return with_weights(task, weights), tree_loss, collection


def dynet(weights: Weights) -> Program:
    """The same equations as `models.mvrnn` in DyNet, op by op: DyNet has no cells."""
    import dynet as dy

    collection = dy.ParameterCollection()

    def add(name):
        kind = "add_lookup_parameters" if name in ("vectors", "matrices") else "add_parameters"
        return getattr(collection, kind)(weights[name].shape)

    p = {name: add(name) for name in weights}
    vectors, matrices, W, W_M, W_s, b_s = p.values()
    concatenate, lookup = dy.concatenate, dy.lookup

    def leaf(word):
        return lookup(vectors, word), lookup(matrices, word)

    def vector(a, A, b, B):
        return dy.tanh(W * concatenate([B * a, A * b]))

    def compose(a, A, b, B):
        return vector(a, A, b, B), W_M * concatenate([A, B])

    def encode(tree):
        return leaf(tree) if type(tree) is int else compose(*encode(tree[0]), *encode(tree[1]))

    def scores(tree):
        p = lookup(vectors, tree) if type(tree) is int else vector(*encode(tree[0]), *encode(tree[1]))
        return dy.affine_transform([b_s, W_s, p])

    def loss(batch):
        return dy.esum([dy.pickneglogsoftmax(scores(tree), label) for tree, label in batch])

    return Program([(p[name], value) for name, value in weights.items()], loss, collection=collection)


def _torch_parameters(weights: Weights) -> list[tuple[Any, np.ndarray]]:
    """In the order of the weights; a word's matrix is a row, since a table of PyTorch has rows."""
    import torch

    values = [value.reshape(len(value), -1) if value.ndim == 3 else value for value in weights.values()]
    return [(torch.empty(value.shape, requires_grad=True), value) for value in values]


def torch_by_hand(weights: Weights) -> Program:
    """PyTorch, the trees of a minibatch one level at a time; see `bench.trees.by_levels`.

    The matrices of a pair of children lie one above the other, [A; B], and so do their vectors: operands are views, but
    for the vectors that siblings exchange.
    """
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear

    parameters = _torch_parameters(weights)
    vectors, matrices, W, W_M, W_s, b_s = (tensor for tensor, _ in parameters)
    n = weights["vectors"].shape[1]

    def loss(prepared):
        words, leaves, places, labels = prepared
        leaf_p = embedding(words, vectors, sparse=True).split(leaves)
        leaf_P = embedding(words, matrices, sparse=True).view(-1, n, n).split(leaves)
        swapped = torch.cat([W[:, n:], W[:, :n]], 1)  # for [A b; B a], the order in which the product has them
        p, P = leaf_p[-1], leaf_P[-1]
        for k in range(len(leaves) - 2, -1, -1):
            changed = torch.bmm(P, p.view(-1, 2, n).flip(1).view(-1, n, 1))
            p = torch.tanh(linear(changed.view(-1, 2 * n), swapped))
            p = trees.merged(p, leaf_p[k], places[k])
            if k > 0:
                P = trees.merged(torch.matmul(W_M, P.view(-1, 2 * n, n)), leaf_P[k], places[k])
        return cross_entropy(linear(p, W_s, b_s), labels, reduction="sum")

    return Program(parameters, loss, trees.by_levels)


def torch_one_by_one(weights: Weights) -> Program:
    """PyTorch, node by node, as one writes it without a thought for batching."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear

    parameters = _torch_parameters(weights)
    vectors, matrices, W, W_M, W_s, b_s = (tensor for tensor, _ in parameters)
    n = weights["vectors"].shape[1]

    def vector(a, A, b, B):
        return torch.tanh(W @ torch.cat([B @ a, A @ b]))

    def encode(tree):
        if type(tree) is int:
            word = torch.tensor([tree])
            return embedding(word, vectors, sparse=True)[0], embedding(word, matrices, sparse=True).view(n, n)
        a, A = encode(tree[0])
        b, B = encode(tree[1])
        return vector(a, A, b, B), W_M @ torch.cat([A, B])

    def tree_loss(tree, label):
        if type(tree) is int:
            p = embedding(torch.tensor([tree]), vectors, sparse=True)[0]
        else:
            p = vector(*encode(tree[0]), *encode(tree[1]))
        return cross_entropy(linear(p, W_s, b_s), torch.tensor(label), reduction="sum")

    return Program(parameters, lambda batch: sum(tree_loss(tree, label) for tree, label in batch))


PROGRAMS = {
    **own_programs(_dynbatch),
    "dynet": dynet,
    "torch-by-hand": torch_by_hand,
    "torch-one-by-one": torch_one_by_one,
}
