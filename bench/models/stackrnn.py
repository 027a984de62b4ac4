"""The shift-reduce parser of `models.stackrnn` with random weights; the loss is that of the actions that it chooses.

An instance is a tuple of word numbers. Each action follows from scores that are read, so DyNet and PyTorch take one
after another.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, own_mapped_programs, without_cells
from bench.sentences import Weights

UNIT = "sentences"
MODES = ("infer",)  # training changes decisions that were close
SHIFT = 0  # the number of an action; the others join
TABLES = ("words", "actions", "empty")
NETWORKS = "sba"  # of the stack, the buffer and the actions
COMPOSED = "lra"  # left part, right part, action


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The sentences of the trees in ``folder``/train.txt, or generated ones. Sizes: ``words`` and ``actions``."""
    from models.stackrnn import StackParser

    train, _ = StackParser.data(Namespace(data=folder))
    vocabulary = StackParser.vocabulary(Namespace(), train)
    numbers = {word: number for number, word in enumerate(vocabulary["words"], start=1)}
    instances = [tuple(numbers[word] for word in words) for words, _ in train]
    return instances, {"words": 1 + len(numbers), "actions": vocabulary["actions"]}


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names of `models.stackrnn`."""
    shapes: dict[str, tuple[int, ...]] = {name: ((sizes | {"empty": 3})[name], hidden) for name in TABLES}
    for kind, names in (("W", NETWORKS), ("V", NETWORKS), ("U", COMPOSED), ("P", NETWORKS)):
        shapes |= {f"{kind}_{name}": (hidden, hidden) for name in names}
    shapes |= {f"b_{name}": (hidden,) for name in "sbaup"}
    shapes |= {"G": (sizes["actions"], hidden), "q": (sizes["actions"],)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of the buffer; of stack, past and scores at every action; of compositions."""
    words = len(instance)
    squares = 2 * words + (2 + 2 + 3) * (2 * words - 1) + 3 * (words - 1)
    return 2.0 * hidden * (squares * hidden + (2 * words - 1) * sizes["actions"])


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    import dynbatch as dy
    from models.stackrnn import StackParser

    collection = dy.ParameterCollection()
    words, hidden = weights["words"].shape
    vocabulary = {"words": range(1, words), "actions": len(weights["actions"])}
    task = StackParser(collection, Namespace(hidden=hidden), vocabulary)
    if not cells:
        without_cells(task)
    parameters = [(getattr(task, name), value) for name, value in weights.items()]
    return parameters, lambda words: dy.esum(task.parse(words, task.best)[1]), collection


def dynet(weights: Weights) -> Program:
    """The same equations in DyNet, one action after another; what is asked for is computed at once."""
    import dynet as dy

    collection = dy.ParameterCollection()
    p = sentences.add_weights(collection, weights, tuple(weights), TABLES)
    (W_s, W_b, W_a), (V_s, V_b, V_a), (P_s, P_b, P_a) = ([p[f"{k}_{name}"] for name in NETWORKS] for k in "WVP")
    U_l, U_r, U_a = (p[f"U_{name}"] for name in COMPOSED)
    b_s, b_b, b_a, b_u, b_p = (p[f"b_{name}"] for name in "sbaup")
    words, actions, G, q = p["words"], p["actions"], p["G"], p["q"]
    affine, tanh, last = dy.affine_transform, dy.tanh, len(weights["actions"])

    def parse(sentence, losses):
        bottom, b, a = (dy.lookup(p["empty"], k) for k in range(3))
        vectors, buffer = [dy.lookup(words, word) for word in sentence], [b]
        for x in reversed(vectors):
            buffer.append(tanh(affine([b_b, W_b, x, V_b, buffer[-1]])))
        stack, scores = [], None
        while len(buffer) > 1 or len(stack) > 1:
            first, end = (SHIFT if len(buffer) > 1 else 1), (last if len(stack) > 1 else 1)
            action = first
            if end - first > 1:
                action += int(scores.npvalue()[first:end].argmax())
                losses.append(dy.pickneglogsoftmax(scores, action))
            done = dy.lookup(actions, action)
            if action == SHIFT:
                x = vectors[len(vectors) + 1 - len(buffer)]
                buffer.pop()
            else:
                (right, _), (left, _) = stack.pop(), stack.pop()
                x = tanh(affine([b_u, U_l, left, U_r, right, U_a, done]))
            s = tanh(affine([b_s, W_s, x, V_s, stack[-1][1] if stack else bottom]))
            a = tanh(affine([b_a, W_a, done, V_a, a]))
            state = dy.rectify(affine([b_p, P_s, s, P_b, buffer[-1], P_a, a]))
            scores = affine([q, G, state])
            stack.append((x, s))

    def loss(batch):
        losses = []
        for sentence in batch:
            parse(sentence, losses)
        return dy.esum(losses)

    return Program([(p[name], value) for name, value in weights.items()], loss, collection=collection)


def torch_one_by_one(weights: Weights) -> Program:
    """The same in PyTorch, with the matrices of a sum side by side, one action after another."""
    import torch
    from torch.nn.functional import cross_entropy, embedding

    def stacked(*names):
        return np.concatenate([weights[name] for name in names], axis=1).T

    values = {name: weights[name] for name in (*TABLES, "b_s", "b_b", "b_a", "b_u", "b_p", "q")}
    values |= {kind: stacked(f"W_{kind}", f"V_{kind}") for kind in NETWORKS}
    values |= {"U": stacked(*(f"U_{k}" for k in COMPOSED)), "P": stacked(*(f"P_{k}" for k in NETWORKS))}
    tensors = sentences.torch_tensors(values | {"G": weights["G"].T}, (*values, "G"))
    p = {name: tensor for name, (tensor, _) in tensors.items()}
    last = len(weights["actions"])

    def affine(bias, matrix, *vectors):
        return torch.addmm(p[bias], torch.cat(vectors, 1), p[matrix])

    def parse(sentence, losses):
        bottom, b, a = embedding(torch.arange(3), p["empty"], sparse=True).split(1)
        vectors = embedding(torch.tensor(sentence), p["words"], sparse=True).split(1)
        buffer = [b]
        for x in reversed(vectors):
            buffer.append(torch.tanh(affine("b_b", "b", x, buffer[-1])))
        stack, scores = [], None
        while len(buffer) > 1 or len(stack) > 1:
            first, end = (SHIFT if len(buffer) > 1 else 1), (last if len(stack) > 1 else 1)
            action = first
            if end - first > 1:
                action += int(scores[0, first:end].argmax())
                losses.append(cross_entropy(scores, torch.tensor([action])))
            done = embedding(torch.tensor([action]), p["actions"], sparse=True)
            if action == SHIFT:
                x = vectors[len(vectors) + 1 - len(buffer)]
                buffer.pop()
            else:
                (right, _), (left, _) = stack.pop(), stack.pop()
                x = torch.tanh(affine("b_u", "U", left, right, done))
            s = torch.tanh(affine("b_s", "s", x, stack[-1][1] if stack else bottom))
            a = torch.tanh(affine("b_a", "a", done, a))
            scores = affine("q", "G", torch.relu(affine("b_p", "P", s, buffer[-1], a)))
            stack.append((x, s))

    def loss(batch):
        losses = []
        for sentence in batch:
            parse(sentence, losses)
        return sum(losses)

    return Program(list(tensors.values()), loss)


PROGRAMS = {
    **own_mapped_programs(_dynbatch),
    "dynet": dynet,
    "torch-one-by-one": torch_one_by_one,
}
