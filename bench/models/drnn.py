"""Trees that grow as in `models.drnn`, by what the network computes; the loss is that of its own decisions.

An instance is (words, tree): numbers of words, and the tree as tuples of tuples of children. The weights are random,
and would grow trees of any size; so the log-odds are shifted by `SURE` towards the instance's tree, as training would.
Labels are the network's own choice. What comes next depends on values, so DyNet and PyTorch go through one node after
another.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, own_mapped_programs, without_cells
from bench.sentences import Weights

UNIT = "trees"
MODES = ("infer",)  # training changes decisions that were close
SURE = 100
START = 0  # in the place of a label: what is above the root, and before a first child
LSTMS = {"_e": "encoder", "_a": "ancestral", "_f": "fraternal"}
TABLES = ("words", "labels")


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The sentences of ``folder``/train.txt, or generated ones. Sizes: ``words`` and ``labels``."""
    from models.drnn import TreeGrower, plants

    train = plants(1024, lowest=4) if folder is None else TreeGrower.data(Namespace(data=folder))[0]
    vocabulary = TreeGrower.vocabulary(Namespace(), train)
    numbers = {word: number for number, word in enumerate(vocabulary["words"], start=1)}

    def shape(node):
        return tuple(map(shape, node.children))

    instances = [(tuple(numbers[word] for word in words), shape(tree)) for words, tree in train]
    return instances, {"words": 1 + len(numbers), "labels": 1 + len(vocabulary["labels"])}


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """Of both tables, the three LSTMs and the predictions, by the names of `models.drnn`."""
    shapes: dict[str, tuple[int, ...]] = {name: (sizes[name], hidden) for name in TABLES}
    for suffix in LSTMS:
        shapes |= sentences.lstm_shapes(hidden, hidden, suffix)
    shapes |= {"U_a": (hidden, hidden), "U_f": (hidden, hidden), "u": (2, hidden)}
    shapes |= {"W": (sizes["labels"], hidden), "v_a": (sizes["labels"],), "v_f": (sizes["labels"],)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of the encoder, and at every node of a step of one LSTM and the prediction."""
    words, tree = instance

    def size(node: tuple) -> int:
        return 1 + sum(map(size, node))

    steps = sentences.lstm_flops(len(words), hidden, hidden) + sentences.lstm_flops(1, hidden, hidden)
    return steps + 2.0 * size(tree) * hidden * (8 * hidden + 2 * hidden + 2 + sizes["labels"])


def shift(row: tuple, k: int) -> tuple[int, int]:
    """What is added to the log-odds that node ``k`` of a row has children, and siblings behind it."""
    return (SURE if row[k] else -SURE), (SURE if k + 1 < len(row) else -SURE)


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    """The model of `models.drnn` as it is there; without cells, the steps of the LSTMs are cells still."""
    import dynbatch as dy
    from models.drnn import Decisions, TreeGrower

    class Shifted(Decisions):
        def __init__(self, row):
            self.row = row

        def shift(self, k):
            return shift(self.row, k)

        def below(self, k):
            return Shifted(self.row[k])

    def tree_loss(instance):
        words, tree = instance
        return dy.esum(task.root(words, Shifted((tree,)))[1])

    collection = dy.ParameterCollection()
    words, hidden = weights["words"].shape
    vocabulary = {"words": range(1, words), "labels": [str(k) for k in range(1, len(weights["labels"]))]}
    task = TreeGrower(collection, Namespace(hidden=hidden), vocabulary)
    if not cells:
        without_cells(task)
    parameters = [(getattr(task, name), value) for name, value in weights.items() if hasattr(task, name)]
    for suffix, name in LSTMS.items():
        parameters += sentences.with_values(getattr(task, name), weights, suffix)
    return parameters, tree_loss, collection


def dynet(weights: Weights) -> Program:
    """The same in DyNet, one node after another; what is asked for is computed at once."""
    import dynet as dy

    collection = dy.ParameterCollection()
    hidden = weights["words"].shape[1]
    p = sentences.add_weights(collection, weights, (*TABLES, "U_a", "U_f", "u", "W", "v_a", "v_f"), TABLES)
    rnns = {suffix: dy.VanillaLSTMBuilder(1, hidden, hidden, collection) for suffix in LSTMS}
    encoder, ancestral, fraternal = rnns.values()
    words, labels, U_a, U_f, u, W, v_a, v_f = p.values()

    def grow(parent, above, eldest, row, losses):
        ancestor = parent.add_input(dy.lookup(labels, above))
        sibling, heads = eldest, []
        for k, children in enumerate(row):
            h = dy.tanh(U_f * sibling.output() + U_a * ancestor.output())
            log_odds = u * h
            a, f = log_odds.npvalue() + shift(row, k) >= 0
            scores = W * h
            if a:
                scores += v_a
            if f:
                scores += v_f
            label = int(scores.npvalue().argmax())
            loss = dy.pickneglogsoftmax(scores, label)
            loss -= dy.log_sigmoid(log_odds[0] if a else -log_odds[0])
            losses.append(loss - dy.log_sigmoid(log_odds[1] if f else -log_odds[1]))
            if a:
                heads.append((label, children))
            if f:
                sibling = sibling.add_input(dy.lookup(labels, label))
        for label, children in heads:
            grow(ancestor, label, eldest, children, losses)

    def loss(batch):
        losses = []
        for sentence, tree in batch:
            state = encoder.initial_state().add_inputs([dy.lookup(words, word) for word in sentence])[-1]
            eldest = fraternal.initial_state().add_input(dy.lookup(labels, START))
            grow(ancestral.initial_state(state.s()), START, eldest, (tree,), losses)
        return dy.esum(losses)

    parameters = [(p[name], weights[name]) for name in p]
    for suffix, rnn in rnns.items():
        parameters += sentences.with_values(rnn, weights, suffix)
    return Program(parameters, loss, collection=collection)


def torch_one_by_one(weights: Weights) -> Program:
    """The same in PyTorch, with the gates stacked, one node after another."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, logsigmoid

    matrices = {name: weights[name].T for name in ("U_a", "U_f", "u", "W")}
    tensors = sentences.torch_tensors(weights | matrices, (*TABLES, *matrices, "v_a", "v_f"))
    words, labels, U_a, U_f, u, W, v_a, v_f = (tensor for tensor, _ in tensors.values())
    lstms = encoder, ancestral, fraternal = [sentences.TorchStep(weights, suffix) for suffix in LSTMS]

    def looked_up(table, number):
        return embedding(torch.tensor([number]), table, sparse=True)

    def grow(parent, above, eldest, row, losses):
        ancestor = ancestral.step(looked_up(labels, above), parent)
        sibling, heads = eldest, []
        for k, children in enumerate(row):
            h = torch.tanh(sibling[0] @ U_f + ancestor[0] @ U_a)
            log_odds = (h @ u)[0]
            a, f = (x + y >= 0 for x, y in zip(log_odds.tolist(), shift(row, k)))
            scores = h @ W
            if a:
                scores = scores + v_a
            if f:
                scores = scores + v_f
            label = scores.argmax()
            losses.append(cross_entropy(scores, label[None]))
            losses.append(-logsigmoid(log_odds[0] if a else -log_odds[0]))
            losses.append(-logsigmoid(log_odds[1] if f else -log_odds[1]))
            if a:
                heads.append((label, children))
            if f:
                sibling = fraternal.step(looked_up(labels, int(label)), sibling)
        for label, children in heads:
            grow(ancestor, int(label), eldest, children, losses)

    def loss(batch):
        losses = []
        for sentence, tree in batch:
            state = None
            for word in sentence:
                state = encoder.step(looked_up(words, word), state)
            grow(state, START, fraternal.step(looked_up(labels, START)), (tree,), losses)
        return sum(losses)

    return Program([*tensors.values(), *(pair for lstm in lstms for pair in lstm.parameters)], loss)


PROGRAMS = {
    **own_mapped_programs(_dynbatch),
    "dynet": dynet,
    "torch-one-by-one": torch_one_by_one,
}
