"""The parser of `models.parser` with its BiLSTM features: the loss of derivations that go where the scores go.

An instance is (words, heads, labels), tuples of numbers, those of words from `ROOT` + 1 on. The weights are random, so
the parses are bad, and cost as much as good ones: each has two transitions a word. Users of DyNet and PyTorch read the
scores of a transition before they can go on, which leaves one sentence after the other.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program
from bench.sentences import FORGET_BIAS, Weights
from models.arc_hybrid import Actions, Configuration, Oracle

UNIT = "sentences"
GENERATED = 2000  # sentences, without --data
ROOT = 1  # in `models.parser`, the number of what stands behind the words
LAYERS = ("_1f", "_1b", "_2f", "_2b")  # of the BiLSTM: suffixes of their weights' names
SLOTS = ("W_s2", "W_s1", "W_s0", "W_b")
TABLES = ("words", "absent")
DENSE = (*SLOTS, "bias", "W_2", "b_2")


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The projective training trees of `models.parser`. Sizes: ``words`` and ``labels``."""
    from models.parser import Parser

    train, _ = Parser.data(Namespace(data=folder))
    vocabulary = Parser.vocabulary(Namespace(), train)
    words = {word: number for number, word in enumerate(vocabulary["words"], start=ROOT + 1)}
    labels = {label: number for number, label in enumerate(vocabulary["labels"])}
    instances = [
        (
            tuple(words[form.lower()] for form in sentence.forms),
            tuple(sentence.heads),
            tuple(labels[label] for label in sentence.labels),
        )
        for sentence in train[:GENERATED]
    ]
    return instances, {"words": ROOT + 1 + len(words), "labels": len(labels)}


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names of `BiLSTMFeatures`, and of the LSTMs by `LAYERS`; ``hidden`` is the size of each, and of words."""
    actions = 1 + 2 * sizes["labels"]
    shapes: dict[str, tuple[int, ...]] = {"words": (sizes["words"], hidden), "absent": (3, hidden)}
    for suffix in LAYERS:
        shapes |= sentences.lstm_shapes(hidden if "1" in suffix else 2 * hidden, hidden, suffix)
    shapes |= dict.fromkeys(SLOTS, (hidden, 2 * hidden))
    shapes |= {"bias": (hidden,), "W_2": (actions, hidden), "b_2": (actions,)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of the BiLSTM, of the parts of each word, and of the scores of each transition."""
    steps = len(instance[0]) + 1
    lstms = 2 * (sentences.lstm_flops(steps, hidden, hidden) + sentences.lstm_flops(steps, 2 * hidden, hidden))
    parts = 2.0 * steps * len(SLOTS) * hidden * 2 * hidden
    return lstms + parts + 2.0 * 2 * (steps - 1) * (1 + 2 * sizes["labels"]) * hidden


def derivation(
    instance: tuple, actions: Actions, score: Callable[..., Any], read: Callable[..., Any], error: Callable[..., Any]
) -> list[Any]:
    """The errors of one sentence's derivation.

    Arguments:
        score: from the words on top of the stack (-1 where there is none) and the front to the scores.
        read: from scores to their values.
        error: from scores and an action to the loss.
    """
    _, heads, labels = instance
    oracle, c, errors = Oracle(heads), Configuration(len(heads)), []
    while not c.is_final:
        scores = score(*(-1, -1, -1, *c.stack)[-3:], c.front_word)
        right, chosen = actions.decide(read(scores), c, oracle, labels)
        errors.append(error(scores, right))
        c = c.take(*actions.table[chosen])
    return errors


def dynbatch(weights: Weights) -> Program:
    """`BiLSTMFeatures` as they are, under ``dy.map``."""
    import dynbatch as dy
    from models.parser_features import BiLSTMFeatures

    collection = dy.ParameterCollection()
    hidden, actions = weights["words"].shape[1], Actions(len(weights["b_2"]) // 2)
    words = collection.add_lookup_parameters(weights["words"].shape)
    features = BiLSTMFeatures(collection, hidden, hidden, len(actions.table))

    @dy.cell
    def error(scores, action):
        return dy.pickneglogsoftmax(scores, action)

    def sentence_loss(instance):
        memory = features.begin([dy.lookup(words, word) for word in (*instance[0], ROOT)])

        def score(s2, s1, s0, b):
            return features.score(memory[s2][0], memory[s1][1], memory[s0][2], memory[b][3])

        return dy.esum(derivation(instance, actions, score, dy.Expression.npvalue, error))

    parameters = [(words, weights["words"]), (features.absent, weights["absent"])]
    parameters += [(getattr(features, name), weights[name]) for name in DENSE]
    parameters += bilstm_values(features.bilstm.builder_layers, weights)
    return Program(parameters, lambda batch: dy.esum(dy.map(sentence_loss, batch)), collection=collection)


def dynet(weights: Weights) -> Program:
    """The same in DyNet, one sentence after the other; the parts of the hidden layer are computed once a word too."""
    import dynet as dy

    collection = dy.ParameterCollection()
    hidden, actions = weights["words"].shape[1], Actions(len(weights["b_2"]) // 2)
    p = {name: collection.add_lookup_parameters(weights[name].shape) for name in TABLES}
    p |= {name: collection.add_parameters(weights[name].shape) for name in DENSE}
    layers = [
        tuple(dy.VanillaLSTMBuilder(1, size, hidden, collection, forget_bias=FORGET_BIAS) for _ in range(2))
        for size in (hidden, 2 * hidden)
    ]
    bias, W_2, b_2 = p["bias"], p["W_2"], p["b_2"]

    def sentence_errors(instance):
        xs = [dy.lookup(p["words"], word) for word in (*instance[0], ROOT)]
        for forward, backward in layers:
            ends = backward.initial_state().transduce(xs[::-1])[::-1]
            xs = [dy.concatenate(list(pair)) for pair in zip(forward.initial_state().transduce(xs), ends)]
        *words, root = ([p[slot] * x for slot in SLOTS] for x in xs)
        memory = [root, *words, [dy.lookup(p["absent"], k) for k in range(3)]]

        def score(s2, s1, s0, b):
            total = dy.esum([memory[s2][0], memory[s1][1], memory[s0][2], memory[b][3], bias])
            return dy.affine_transform([b_2, W_2, dy.tanh(total)])

        return derivation(instance, actions, score, dy.Expression.npvalue, dy.pickneglogsoftmax)

    def loss(batch):
        return dy.esum([error for instance in batch for error in sentence_errors(instance)])

    parameters = [(p[name], weights[name]) for name in p] + bilstm_values(layers, weights)
    return Program(parameters, loss, collection=collection)


def torch_one_by_one(weights: Weights) -> Program:
    """The same in PyTorch, one sentence after the other: ``torch.nn.LSTM``, one product for the parts of all words."""
    import torch
    from torch.nn.functional import cross_entropy, embedding

    actions = Actions(len(weights["b_2"]) // 2)
    values = {name: weights[name] for name in (*TABLES, "bias", "b_2")}
    values |= {"W": np.concatenate([weights[slot] for slot in SLOTS]).T, "W_2": weights["W_2"]}
    tensors = sentences.torch_tensors(values, tuple(values))
    p = {name: tensor for name, (tensor, _) in tensors.items()}
    layers = [sentences.torch_lstm(weights, LAYERS[k : k + 2]) for k in (0, 2)]

    def sentence_errors(instance):
        xs = embedding(torch.tensor((*instance[0], ROOT)), p["words"], sparse=True)
        for lstm, _ in layers:
            xs, _ = lstm(xs)
        parts = (xs @ p["W"]).view(len(xs), len(SLOTS), -1)
        s2, s1, s0 = (torch.cat([parts[-1:, k], parts[:-1, k], p["absent"][k : k + 1]]) for k in range(3))
        front = torch.cat([parts[-1:, 3], parts[:-1, 3]])

        def score(*words):
            hidden = s2[words[0]] + s1[words[1]] + s0[words[2]] + front[words[3]] + p["bias"]
            return torch.addmv(p["b_2"], p["W_2"], torch.tanh(hidden))

        def error(scores, action):
            return cross_entropy(scores[None], torch.tensor([action]))

        return derivation(instance, actions, score, lambda scores: scores.detach().numpy(), error)

    def loss(batch):
        return sum(error for instance in batch for error in sentence_errors(instance))

    return Program([*tensors.values(), *(pair for _, pairs in layers for pair in pairs)], loss)


def bilstm_values(layers: list[tuple[Any, Any]], weights: Weights) -> list[tuple[Any, np.ndarray]]:
    """The parameters of the builders of both layers and directions, with their values."""
    builders = [builder for pair in layers for builder in pair]
    return [
        pair for builder, suffix in zip(builders, LAYERS) for pair in sentences.with_values(builder, weights, suffix)
    ]


PROGRAMS = {"dynbatch": dynbatch, "dynet": dynet, "torch-one-by-one": torch_one_by_one}
