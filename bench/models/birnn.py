"""The bidirectional LSTM of `models.birnn`, with the loss summed over the words, in each of the systems.

An instance is (words, tags), two tuples of numbers of the same length.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, recording, replaying
from bench.sentences import FORGET_BIAS, Weights

UNIT = "sentences"
GENERATED = 2000  # sentences, without --data
TAGS = 9  # in generated sentences
DIRECTIONS = ("_f", "_b")  # forward and backward: suffixes of their weights' names
OUTPUT = ("W_s", "b_s")  # from both directions' outputs, one above the other, to the scores of the tags


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """Sentences of ``folder``/train.txt, else dev.txt: one a line, ``word|tag`` between spaces. Or generated ones.

    Sizes: ``words`` and ``tags``.
    """
    if folder is None:
        random = np.random.default_rng(1)
        found = sentences.generate(GENERATED, random)
        instances = [(words, tuple(random.integers(TAGS, size=len(words)).tolist())) for words in found]
        return instances, {"words": sentences.WORDS, "tags": TAGS}
    from models.sentences import read_sentences

    path = Path(folder) / "train.txt"
    words: dict[str, int] = {}
    tags: dict[str, int] = {}

    def numbers(found: tuple, known: dict[str, int]) -> tuple[int, ...]:
        return tuple([known.setdefault(x, len(known)) for x in found])

    read = read_sentences(path if path.exists() else Path(folder) / "dev.txt")
    instances = [(numbers(sentence.words, words), numbers(sentence.tags, tags)) for sentence in read]
    return instances, {"words": len(words), "tags": len(tags)}


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """Those of the LSTMs end in _f (forward) and _b (backward); ``hidden`` is the size of each, and of embeddings."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (sizes["words"], hidden)}
    for suffix in DIRECTIONS:
        shapes |= sentences.lstm_shapes(hidden, hidden, suffix)
    shapes |= {"W_s": (sizes["tags"], 2 * hidden), "b_s": (sizes["tags"],)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of both directions, and of the scores."""
    steps = len(instance[0])
    return 2 * sentences.lstm_flops(steps, hidden, hidden) + 2.0 * steps * sizes["tags"] * 2 * hidden


def dynbatch(weights: Weights) -> Program:
    """The model of `models.birnn` as it is there."""
    return recording(*_dynbatch(weights))


def dynbatch_static(weights: Weights) -> Program:
    """The same cells, with the loss of a sentence under ``@dy.static``; see `bench.models.replaying`."""
    return replaying(*_dynbatch(weights))


def _dynbatch(weights: Weights) -> tuple[list, Callable[[Any], Any], Any]:
    """Parameters with their values, the function from an instance to its loss, and the collection."""
    import dynbatch as dy
    from models.birnn import Tagger

    collection = dy.ParameterCollection()
    words, hidden = weights["embeddings"].shape
    vocabulary = {"words": range(1, words), "tags": range(len(weights["b_s"]))}
    task = Tagger(collection, Namespace(hidden=hidden), vocabulary)
    word_loss = task.word_loss

    def sentence_loss(instance):
        words, tags = instance
        return dy.esum([word_loss(h_f, h_b, tag) for (h_f, h_b), tag in zip(task.encode(words), tags)])

    parameters = [(getattr(task, name), weights[name]) for name in ("embeddings", *OUTPUT)]
    for builder, suffix in zip((task.forward, task.backward), DIRECTIONS):
        parameters += sentences.with_values(builder, weights, suffix)
    return parameters, sentence_loss, collection


def dynbatch_plain(weights: Weights) -> Program:
    """Op by op, without cells."""
    import dynbatch as dy

    collection = dy.ParameterCollection()
    hidden = weights["embeddings"].shape[1]
    p = sentences.add_weights(collection, weights, tuple(weights))
    forward, backward = (sentences.plain_lstm(p, hidden, suffix) for suffix in DIRECTIONS)
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    def sentence_loss(instance):
        words, tags = instance
        xs = [dy.lookup(embeddings, word) for word in words]
        outputs = zip(forward(xs), backward(xs[::-1])[::-1])
        scores = [dy.affine_transform([b_s, W_s, dy.concatenate(list(hs))]) for hs in outputs]
        return dy.esum([dy.pickneglogsoftmax(score, tag) for score, tag in zip(scores, tags)])

    return recording([(p[name], weights[name]) for name in p], sentence_loss, collection)


def dynet(weights: Weights) -> Program:
    """With DyNet's ``VanillaLSTMBuilder``."""
    import dynet as dy

    collection = dy.ParameterCollection()
    hidden = weights["embeddings"].shape[1]
    p = sentences.add_weights(collection, weights, ("embeddings", *OUTPUT))
    forward, backward = (dy.VanillaLSTMBuilder(1, hidden, hidden, collection, forget_bias=FORGET_BIAS) for _ in "fb")
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    def word_losses(instance):
        words, tags = instance
        xs = [dy.lookup(embeddings, word) for word in words]
        outputs = zip(forward.initial_state().transduce(xs), backward.initial_state().transduce(xs[::-1])[::-1])
        scores = [dy.affine_transform([b_s, W_s, dy.concatenate(list(hs))]) for hs in outputs]
        return [dy.pickneglogsoftmax(score, tag) for score, tag in zip(scores, tags)]

    def loss(batch):
        return dy.esum([loss for instance in batch for loss in word_losses(instance)])

    parameters = [(p[name], weights[name]) for name in p]
    for builder, suffix in zip((forward, backward), DIRECTIONS):
        parameters += sentences.with_values(builder, weights, suffix)
    return Program(parameters, loss, collection=collection)


def torch_by_hand(weights: Weights) -> Program:
    """``torch.nn.LSTM`` on packed sentences: no step has padding. The scores of all words are one product."""
    from torch.nn.functional import cross_entropy, embedding, linear
    from torch.nn.utils.rnn import PackedSequence

    lstm, parameters = sentences.torch_lstm(weights, DIRECTIONS)
    tensors = sentences.torch_tensors(weights, ("embeddings", *OUTPUT))
    E, W_s, b_s = (tensor for tensor, _ in tensors.values())

    def prepare(batch):
        return sentences.packed(batch, 2)

    def loss(prepared):
        (words, tags), counts = prepared
        outputs, _ = lstm(PackedSequence(embedding(words, E, sparse=True), counts))
        return cross_entropy(linear(outputs.data, W_s, b_s), tags, reduction="sum")

    return Program([*parameters, *tensors.values()], loss, prepare)


def torch_one_by_one(weights: Weights) -> Program:
    """``torch.nn.LSTM`` on one sentence after another."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear

    lstm, parameters = sentences.torch_lstm(weights, DIRECTIONS)
    tensors = sentences.torch_tensors(weights, ("embeddings", *OUTPUT))
    E, W_s, b_s = (tensor for tensor, _ in tensors.values())

    def sentence_loss(instance):
        words, tags = map(torch.tensor, instance)
        outputs, _ = lstm(embedding(words, E, sparse=True))
        return cross_entropy(linear(outputs, W_s, b_s), tags, reduction="sum")

    return Program([*parameters, *tensors.values()], lambda batch: sum(map(sentence_loss, batch)))


PROGRAMS = {
    "dynbatch": dynbatch,
    "dynbatch-static": dynbatch_static,
    "dynbatch-plain": dynbatch_plain,
    "dynet": dynet,
    "torch-by-hand": torch_by_hand,
    "torch-one-by-one": torch_one_by_one,
}
