"""Trees that grow as in `models.drnn`, by what the network computes; the loss is that of its own decisions.

An instance is (words, tree): numbers of words, and the tree as tuples of tuples of children. The weights are random,
and would grow trees of any size; so the log-odds, once they are read, are shifted by `SURE` towards the instance's
tree, as training would. Labels are the network's own choice. What comes next depends on values, so DyNet and PyTorch go
through one node after another.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, mapped, without_cells
from bench.sentences import Weights

UNIT = "trees"
SURE = 100.0  # in log-odds
FIRST = 0  # in the place of a label, before the first sibling
LSTMS = {"_e": "encoder", "_a": "ancestral", "_f": "fraternal"}
TABLES = ("words", "labels")


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The sentences of ``folder``/train.txt, or generated ones. Sizes: ``words`` and ``labels``."""
    from models.drnn import TreeGrower

    train, _ = TreeGrower.data(Namespace(data=folder))
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


def shifted(log_odds: np.ndarray, row: tuple, k: int) -> tuple[bool, bool]:
    """Whether node ``k`` of a row has children, and siblings behind it."""
    children, siblings = log_odds
    return children + (SURE if row[k] else -SURE) > 0, siblings + (SURE if k + 1 < len(row) else -SURE) > 0


def dynbatch(weights: Weights) -> Program:
    """The model of `models.drnn` as it is there, in cells, under ``dy.map``."""
    return mapped(*_dynbatch(weights, cells=True))


def dynbatch_plain(weights: Weights) -> Program:
    """The same without cells in the model; the steps of the LSTM are cells."""
    return mapped(*_dynbatch(weights, cells=False))


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    import dynbatch as dy
    from models.drnn import Decisions, TreeGrower

    class Shifted(Decisions):
        def __init__(self, row):
            self.row = row

        def topology(self, k, log_odds):
            return shifted(log_odds.npvalue(), self.row, k)

        def below(self, k):
            return Shifted(self.row[k])

    def tree_loss(instance):
        words, tree = instance
        return dy.esum(task.grow(task.root(words), Shifted((tree,)))[1])

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

    def grow(ancestor, row, losses):
        heads = []
        siblings = fraternal.initial_state().add_input(dy.lookup(labels, FIRST))
        more = True
        while more:
            h = dy.tanh(U_f * siblings.output() + U_a * ancestor.output())
            topology = u * h
            grows, more = shifted(topology.npvalue(), row, len(heads))
            scores = W * h
            if grows:
                scores += v_a
            if more:
                scores += v_f
            label = int(scores.npvalue().argmax())
            children = dy.log_sigmoid(topology[0] if grows else -topology[0])
            following = dy.log_sigmoid(topology[1] if more else -topology[1])
            losses.append(dy.pickneglogsoftmax(scores, label) - children - following)
            x = dy.lookup(labels, label)
            heads.append((x, grows))
            if more:
                siblings = siblings.add_input(x)
        for (x, grows), children in zip(heads, row):
            if grows:
                grow(ancestor.add_input(x), children, losses)

    def loss(batch):
        losses = []
        for sentence, tree in batch:
            state = encoder.initial_state().add_inputs([dy.lookup(words, word) for word in sentence])[-1]
            grow(ancestral.initial_state(state.s()), (tree,), losses)
        return dy.esum(losses)

    parameters = [(p[name], weights[name]) for name in p]
    for suffix, rnn in rnns.items():
        parameters += sentences.with_values(rnn, weights, suffix)
    return Program(parameters, loss, collection=collection)


def torch_one_by_one(weights: Weights) -> Program:
    """The same in PyTorch, with the gates stacked, one node after another."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, logsigmoid

    tensors = sentences.torch_tensors(weights, (*TABLES, "U_a", "U_f", "u", "W", "v_a", "v_f"))
    words, labels, U_a, U_f, u, W, v_a, v_f = (tensor for tensor, _ in tensors.values())
    lstms = encoder, ancestral, fraternal = [sentences.TorchStep(weights, suffix) for suffix in LSTMS]

    def looked_up(table, number):
        return embedding(torch.tensor([number]), table, sparse=True)

    def grow(ancestor, row, losses):
        heads = []
        siblings = fraternal.step(looked_up(labels, FIRST))
        more = True
        while more:
            h = torch.tanh(siblings[0] @ U_f.T + ancestor[0] @ U_a.T)
            topology = (h @ u.T)[0]
            grows, more = shifted(topology.tolist(), row, len(heads))
            scores = h @ W.T
            if grows:
                scores = scores + v_a
            if more:
                scores = scores + v_f
            label = scores.argmax()
            losses.append(cross_entropy(scores, label[None], reduction="sum"))
            losses.append(-logsigmoid(topology[0] if grows else -topology[0]))
            losses.append(-logsigmoid(topology[1] if more else -topology[1]))
            x = looked_up(labels, int(label))
            heads.append((x, grows))
            if more:
                siblings = fraternal.step(x, siblings)
        for (x, grows), children in zip(heads, row):
            if grows:
                grow(ancestral.step(x, ancestor), children, losses)

    def loss(batch):
        losses = []
        for sentence, tree in batch:
            state = None
            for word in sentence:
                state = encoder.step(looked_up(words, word), state)
            grow(state, (tree,), losses)
        return sum(losses)

    return Program([*tensors.values(), *(pair for lstm in lstms for pair in lstm.parameters)], loss)


PROGRAMS = {
    "dynbatch": dynbatch,
    "dynbatch-plain": dynbatch_plain,
    "dynet": dynet,
    "torch-one-by-one": torch_one_by_one,
}
