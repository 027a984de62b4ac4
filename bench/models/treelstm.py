"""The binary TreeLSTM of `models.treelstm`, with the loss at the root, in each of the systems.

Instances are those of `bench.trees`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import trees
from bench.models import Program, own_programs, with_weights, without_cells

UNIT = trees.UNIT
GATES = "ioufg"  # input, output, update, and what stays of the left and of the right child's memory
LEAF_GATES = "iou"  # a leaf has no children; it comes first in GATES, so that its biases do in a stacked bias
load = trees.load

Weights = dict[str, np.ndarray]


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names that `models.treelstm` has for them: ``L_i`` is the matrix of gate i for the left child."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (sizes["words"], hidden)}
    shapes |= {f"W_{gate}": (hidden, hidden) for gate in LEAF_GATES}
    shapes |= {f"{side}_{gate}": (hidden, hidden) for side in "LR" for gate in GATES}
    shapes |= {f"b_{gate}": (hidden,) for gate in GATES}
    shapes |= {"W_s": (sizes["classes"], hidden), "b_s": (sizes["classes"],)}
    deviation = 1 / np.sqrt(hidden)  # keeps the gates' inputs near 1 in every width
    return {name: random.standard_normal(shape, np.float32) * np.float32(deviation) for name, shape in shapes.items()}


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Three square products at a leaf, ten at an inner node, and the classifier at the root."""
    leaves = trees.leaf_count(instance[0])
    squares = len(LEAF_GATES) * leaves + 2 * len(GATES) * (leaves - 1)
    return 2.0 * (squares * hidden * hidden + sizes["classes"] * hidden)


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    """Parameters with their values, the function from an instance to its loss, and the collection."""
    import dynbatch as dy
    from models.treelstm import TreeClassifier

    collection = dy.ParameterCollection()
    words, hidden = weights["embeddings"].shape
    flags = Namespace(cell="binary", hidden=hidden, dropout=0.0)
    task = TreeClassifier(collection, flags, {"words": range(1, words), "classes": len(weights["b_s"])})
    encoder = task.encoder
    if not cells:
        without_cells(task, encoder)
    leaf, compose, node_loss = encoder.leaf, encoder.compose, task.node_loss

    def encode(tree):
        if type(tree) is int:
            return leaf(tree)
        h_l, c_l = encode(tree[0])
        h_r, c_r = encode(tree[1])
        return compose(h_l, c_l, h_r, c_r)

    def tree_loss(instance):
        tree, label = instance
        return node_loss(encode(tree)[0], label)

    return with_weights(task, weights), tree_loss, collection


def dynet(weights: Weights) -> Program:
    """The same equations as `models.treelstm` in DyNet, op by op: DyNet has no cells."""
    import dynet as dy

    collection = dy.ParameterCollection()
    p = {name: collection.add_parameters(value.shape) for name, value in weights.items() if name != "embeddings"}
    p["embeddings"] = collection.add_lookup_parameters(weights["embeddings"].shape)
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]
    W_i, W_o, W_u = (p[f"W_{gate}"] for gate in LEAF_GATES)
    L_i, L_o, L_u, L_f, L_g = (p[f"L_{gate}"] for gate in GATES)
    R_i, R_o, R_u, R_f, R_g = (p[f"R_{gate}"] for gate in GATES)
    b_i, b_o, b_u, b_f, b_g = (p[f"b_{gate}"] for gate in GATES)
    affine_transform, cmult, logistic, tanh = dy.affine_transform, dy.cmult, dy.logistic, dy.tanh

    def leaf(word):
        x = dy.lookup(embeddings, word)
        i = logistic(affine_transform([b_i, W_i, x]))
        o = logistic(affine_transform([b_o, W_o, x]))
        u = tanh(affine_transform([b_u, W_u, x]))
        c = cmult(i, u)
        return cmult(o, tanh(c)), c

    def compose(h_l, c_l, h_r, c_r):
        i = logistic(affine_transform([b_i, L_i, h_l, R_i, h_r]))
        f = logistic(affine_transform([b_f, L_f, h_l, R_f, h_r]))
        g = logistic(affine_transform([b_g, L_g, h_l, R_g, h_r]))
        o = logistic(affine_transform([b_o, L_o, h_l, R_o, h_r]))
        u = tanh(affine_transform([b_u, L_u, h_l, R_u, h_r]))
        c = cmult(i, u) + cmult(f, c_l) + cmult(g, c_r)
        return cmult(o, tanh(c)), c

    def encode(tree):
        if type(tree) is int:
            return leaf(tree)
        h_l, c_l = encode(tree[0])
        h_r, c_r = encode(tree[1])
        return compose(h_l, c_l, h_r, c_r)

    def loss(batch):
        scores = [affine_transform([b_s, W_s, encode(tree)[0]]) for tree, _ in batch]
        return dy.esum([dy.pickneglogsoftmax(score, label) for score, (_, label) in zip(scores, batch)])

    return Program([(p[name], value) for name, value in weights.items()], loss, collection=collection)


def _torch_parameters(weights: Weights) -> list[tuple[Any, np.ndarray]]:
    """Embeddings, leaf matrix, node matrix, gate biases, classifier matrix and bias.

    The gates are stacked, so that a leaf and a node are one product each; a node's runs over both children.
    """
    import torch

    def stacked(side, gates):
        return np.concatenate([weights[f"{side}_{gate}"] for gate in gates])

    values = [
        weights["embeddings"],
        stacked("W", LEAF_GATES).T,
        np.concatenate([stacked("L", GATES), stacked("R", GATES)], axis=1).T,
        stacked("b", GATES),
        weights["W_s"].T,
        weights["b_s"],
    ]
    return [(torch.tensor(np.array(value, order="C"), requires_grad=True), value) for value in values]


def torch_by_hand(weights: Weights) -> Program:
    """PyTorch, the trees of a minibatch one level at a time; see `bench.trees.by_levels`.

    The two h of a pair of children lie side by side, and the operand of the product is a view. (Levels by height, the
    usual choice, need the children gathered from all levels below; measured at hidden 64 and batch 64, they took 1.35
    times as long in inference and 1.4 times in training.) All leaves are one product.
    """
    import torch
    from torch.nn.functional import cross_entropy, embedding

    parameters = _torch_parameters(weights)
    (E, W, U, b, W_s, b_s), hidden = (tensor for tensor, _ in parameters), weights["embeddings"].shape[1]
    leaf_b = b[: len(LEAF_GATES) * hidden]

    def loss(prepared):
        words, leaves, places, labels = prepared
        i, o, u = torch.addmm(leaf_b, embedding(words, E, sparse=True), W).chunk(3, 1)
        leaf_c = torch.sigmoid(i) * torch.tanh(u)
        leaf_h = torch.sigmoid(o) * torch.tanh(leaf_c)
        leaf_h, leaf_c = leaf_h.split(leaves), leaf_c.split(leaves)
        h, c = leaf_h[-1], leaf_c[-1]
        for k in range(len(leaves) - 2, -1, -1):
            c_l, c_r = c.view(-1, 2 * hidden).chunk(2, 1)
            i, o, u, f, g = torch.addmm(b, h.view(-1, 2 * hidden), U).chunk(5, 1)
            c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * c_l + torch.sigmoid(g) * c_r
            h = torch.sigmoid(o) * torch.tanh(c)
            h, c = trees.merged(h, leaf_h[k], places[k]), trees.merged(c, leaf_c[k], places[k])
        return cross_entropy(torch.addmm(b_s, h, W_s), labels, reduction="sum")

    return Program(parameters, loss, trees.by_levels)


def torch_one_by_one(weights: Weights) -> Program:
    """PyTorch, node by node, as one writes it without a thought for batching; but with the gates stacked."""
    import torch
    from torch.nn.functional import cross_entropy, embedding

    parameters = _torch_parameters(weights)
    (E, W, U, b, W_s, b_s), hidden = (tensor for tensor, _ in parameters), weights["embeddings"].shape[1]
    leaf_b = b[: len(LEAF_GATES) * hidden]

    def encode(tree):
        if type(tree) is int:
            x = embedding(torch.tensor([tree]), E, sparse=True)
            i, o, u = torch.addmm(leaf_b, x, W).chunk(3, 1)
            c = torch.sigmoid(i) * torch.tanh(u)
        else:
            (h_l, c_l), (h_r, c_r) = encode(tree[0]), encode(tree[1])
            i, o, u, f, g = torch.addmm(b, torch.cat([h_l, h_r], 1), U).chunk(5, 1)
            c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * c_l + torch.sigmoid(g) * c_r
        return torch.sigmoid(o) * torch.tanh(c), c

    def loss(batch):
        return sum(
            cross_entropy(torch.addmm(b_s, encode(tree)[0], W_s), torch.tensor([label]), reduction="sum")
            for tree, label in batch
        )

    return Program(parameters, loss)


PROGRAMS = {
    **own_programs(_dynbatch),
    "dynet": dynet,
    "torch-by-hand": torch_by_hand,
    "torch-one-by-one": torch_one_by_one,
}
