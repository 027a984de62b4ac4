"""An LSTM language model over sentences of unequal lengths: every word but the first is predicted.

An instance is a tuple of word numbers, two at least.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, recording, replaying
from bench.sentences import FORGET_BIAS, Weights
from dynbatch.errors import FileFormatError

UNIT = "sentences"
GENERATED = 2000  # sentences, without --data
OUTPUT = ("W_s", "b_s")  # from the LSTM's output to the scores of all words


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """Sentences of ``folder``/train.txt: one a line, words between spaces. Or generated ones. Sizes: ``words``.

    Raises:
        FileFormatError: a sentence of one word; names the file and the line.
    """
    if folder is None:
        return sentences.generate(GENERATED, np.random.default_rng(1)), {"words": sentences.WORDS}
    path = Path(folder) / "train.txt"
    instances = []
    numbers: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if len(words) == 1:
            raise FileFormatError(f"{path}, line {number}: a sentence needs two words at least")
        if words:
            instances.append(tuple(numbers.setdefault(word, len(numbers)) for word in words))
    return instances, {"words": len(numbers)}


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """Of embeddings and LSTM, both of size ``hidden``, and of the scores."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (sizes["words"], hidden)}
    shapes |= sentences.lstm_shapes(hidden, hidden)
    shapes |= {"W_s": (sizes["words"], hidden), "b_s": (sizes["words"],)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of the LSTM, and of the scores."""
    steps = len(instance) - 1
    return sentences.lstm_flops(steps, hidden, hidden) + 2.0 * steps * sizes["words"] * hidden


def dynbatch(weights: Weights) -> Program:
    """With ``dy.VanillaLSTMBuilder``, whose step is a cell, and a cell for the loss of a word."""
    return recording(*_dynbatch(weights))


def dynbatch_static(weights: Weights) -> Program:
    """The same, with the loss of a sentence under ``@dy.static``; see `bench.models.replaying`."""
    return replaying(*_dynbatch(weights))


def _dynbatch(weights: Weights) -> tuple[list, Callable[[Any], Any], Any]:
    import dynbatch as dy

    collection = dy.ParameterCollection()
    hidden = weights["embeddings"].shape[1]
    p = sentences.add_weights(collection, weights, ("embeddings", *OUTPUT))
    rnn = dy.VanillaLSTMBuilder(1, hidden, hidden, collection, forget_bias=FORGET_BIAS)
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    @dy.cell
    def word_loss(h, word):
        return dy.pickneglogsoftmax(dy.affine_transform([b_s, W_s, h]), word)

    def sentence_loss(words):
        outputs = rnn.initial_state().transduce([dy.lookup(embeddings, word) for word in words[:-1]])
        return dy.esum([word_loss(h, word) for h, word in zip(outputs, words[1:])])

    parameters = [(p[name], weights[name]) for name in p] + sentences.with_values(rnn, weights)
    return parameters, sentence_loss, collection


def dynbatch_plain(weights: Weights) -> Program:
    """Op by op, without cells."""
    import dynbatch as dy

    collection = dy.ParameterCollection()
    p = sentences.add_weights(collection, weights, tuple(weights))
    transduce = sentences.plain_lstm(p, weights["embeddings"].shape[1])
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    def sentence_loss(words):
        outputs = transduce([dy.lookup(embeddings, word) for word in words[:-1]])
        scores = [dy.affine_transform([b_s, W_s, h]) for h in outputs]
        return dy.esum([dy.pickneglogsoftmax(score, word) for score, word in zip(scores, words[1:])])

    return recording([(p[name], weights[name]) for name in p], sentence_loss, collection)


def dynet(weights: Weights) -> Program:
    """With DyNet's ``VanillaLSTMBuilder``."""
    import dynet as dy

    collection = dy.ParameterCollection()
    hidden = weights["embeddings"].shape[1]
    p = sentences.add_weights(collection, weights, ("embeddings", *OUTPUT))
    rnn = dy.VanillaLSTMBuilder(1, hidden, hidden, collection, forget_bias=FORGET_BIAS)
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    def word_losses(words):
        outputs = rnn.initial_state().transduce([dy.lookup(embeddings, word) for word in words[:-1]])
        scores = [dy.affine_transform([b_s, W_s, h]) for h in outputs]
        return [dy.pickneglogsoftmax(score, word) for score, word in zip(scores, words[1:])]

    def loss(batch):
        return dy.esum([loss for words in batch for loss in word_losses(words)])

    parameters = [(p[name], weights[name]) for name in p] + sentences.with_values(rnn, weights)
    return Program(parameters, loss, collection=collection)


def torch_by_hand(weights: Weights) -> Program:
    """``torch.nn.LSTM`` on packed sentences: no step has padding. The scores of all words are one product."""
    from torch.nn.functional import cross_entropy, embedding, linear
    from torch.nn.utils.rnn import PackedSequence

    lstm, parameters = sentences.torch_lstm(weights, ("",))
    tensors = sentences.torch_tensors(weights, ("embeddings", *OUTPUT))
    E, W_s, b_s = (tensor for tensor, _ in tensors.values())

    def prepare(batch):
        return sentences.packed([(words[:-1], words[1:]) for words in batch], 2)

    def loss(prepared):
        (words, following), counts = prepared
        outputs, _ = lstm(PackedSequence(embedding(words, E, sparse=True), counts))
        return cross_entropy(linear(outputs.data, W_s, b_s), following, reduction="sum")

    return Program([*parameters, *tensors.values()], loss, prepare)


def torch_one_by_one(weights: Weights) -> Program:
    """``torch.nn.LSTM`` on one sentence after another."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear

    lstm, parameters = sentences.torch_lstm(weights, ("",))
    tensors = sentences.torch_tensors(weights, ("embeddings", *OUTPUT))
    E, W_s, b_s = (tensor for tensor, _ in tensors.values())

    def sentence_loss(words):
        numbers = torch.tensor(words)
        outputs, _ = lstm(embedding(numbers[:-1], E, sparse=True))
        return cross_entropy(linear(outputs, W_s, b_s), numbers[1:], reduction="sum")

    return Program([*parameters, *tensors.values()], lambda batch: sum(map(sentence_loss, batch)))


PROGRAMS = {
    "dynbatch": dynbatch,
    "dynbatch-static": dynbatch_static,
    "dynbatch-plain": dynbatch_plain,
    "dynet": dynet,
    "torch-by-hand": torch_by_hand,
    "torch-one-by-one": torch_one_by_one,
}
