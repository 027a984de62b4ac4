"""The nested recurrent networks of `models.nestedrnn`, with the loss of a document's class, in each of the systems.

An instance is (sentences, label): a tuple of sentences, each a tuple of the numbers of its words.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, own_programs, with_weights, without_cells
from bench.sentences import Weights

UNIT = "documents"
GENERATED = 256  # documents, without --data
SHORTEST, LONGEST = 20, 40  # sentences of a generated document, and words of a sentence: as in the paper
INNER = ("W", "U", "b")  # for words, for the state, and the bias
GATES = "zru"  # of the outer network, in the order of DyNet's builder


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The documents of ``folder``/train.txt, or generated ones. Sizes: ``words`` and ``classes``."""
    from models.documents import generate, read_documents

    if folder is None:
        documents = generate(GENERATED, SHORTEST, LONGEST)
    else:
        documents = read_documents(Path(folder) / "train.txt")
    numbers: dict[str, int] = {}
    instances = []
    for found, label in documents:
        instances.append((tuple([tuple([numbers.setdefault(w, len(numbers)) for w in s]) for s in found]), label))
    return instances, {"words": len(numbers), "classes": 1 + max(label for _, label in instances)}


def outer() -> list[str]:
    """The names of the outer network's weights: three of each gate."""
    return [f"{name}_{gate}" for gate in GATES for name in INNER]


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names that `models.nestedrnn` has for them."""
    square = ((hidden, hidden), (hidden, hidden), (hidden,))
    shapes: dict[str, tuple[int, ...]] = {"embeddings": (sizes["words"], hidden)}
    shapes |= dict(zip(INNER, square)) | dict(zip(outer(), square * len(GATES)))
    shapes |= {"W_s": (sizes["classes"], hidden), "b_s": (sizes["classes"],)}
    return sentences.draw(shapes, hidden, random)


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Two square products a word and six a sentence, without those of first states, which are zero; the classifier."""
    found, _ = instance
    inner = sum(2 * len(words) - 1 for words in found)
    return 2.0 * ((inner + len(GATES) * (2 * len(found) - 1)) * hidden**2 + sizes["classes"] * hidden)


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    """Parameters with their values, the function from an instance to its loss, and the collection."""
    import dynbatch as dy
    from models.nestedrnn import DocumentClassifier

    collection = dy.ParameterCollection()
    words, hidden = weights["embeddings"].shape
    vocabulary = {"words": range(1, words), "classes": len(weights["b_s"])}
    task = DocumentClassifier(collection, Namespace(hidden=hidden), vocabulary)
    encoder = task.encoder
    if not cells:
        without_cells(task, encoder)

    def document_loss(instance):
        found, label = instance
        return task.document_loss(encoder.encode(found), label)

    return with_weights(task, weights), document_loss, collection


def dynet(weights: Weights) -> Program:
    """With DyNet's ``SimpleRNNBuilder`` inside of its ``GRUBuilder``."""
    import dynet as dy

    collection = dy.ParameterCollection()
    hidden = weights["embeddings"].shape[1]
    p = sentences.add_weights(collection, weights, ("embeddings", "W_s", "b_s"))
    inner, gru = dy.SimpleRNNBuilder(1, hidden, hidden, collection), dy.GRUBuilder(1, hidden, hidden, collection)
    embeddings, W_s, b_s = p["embeddings"], p["W_s"], p["b_s"]

    def sentence(words):
        return inner.initial_state().transduce([dy.lookup(embeddings, word) for word in words])[-1]

    def scores(found):
        s = gru.initial_state().transduce([sentence(words) for words in found])[-1]
        return dy.affine_transform([b_s, W_s, s])

    def loss(batch):
        return dy.esum([dy.pickneglogsoftmax(scores(found), label) for found, label in batch])

    parameters = [(p[name], weights[name]) for name in p]
    for builder, names in ((inner, INNER), (gru, outer())):
        parameters += zip(builder.get_parameters()[0], [weights[name] for name in names])
    return Program(parameters, loss, collection=collection)


def _torch_parameters(weights: Weights) -> tuple[Any, list[tuple[Any, np.ndarray]], list[Any]]:
    """The inner network, all parameters with their values, and of these the tensors besides the inner network.

    The tensors are embeddings, classifier matrix and bias; the outer network's matrices for sentences, one above the
    other, its biases, the state's matrices for z and r, and that for u.
    """
    import torch

    rnn, parameters = sentences.torch_rnn(dict(zip(sentences.LSTM, (weights[name] for name in INNER))))
    values = [
        *(weights[name] for name in ("embeddings", "W_s", "b_s")),
        *(np.concatenate([weights[f"{name}_{gate}"] for gate in GATES]) for name in "Wb"),
        np.concatenate([weights["U_z"], weights["U_r"]]),
        weights["U_u"],
    ]
    tensors = [torch.empty(value.shape, requires_grad=True) for value in values]
    return rnn, [*parameters, *zip(tensors, values)], tensors


def torch_by_hand(weights: Weights) -> Program:
    """``torch.nn.RNN`` on the sentences of all documents, packed, and then the outer steps of all documents at once.

    The outer network is not ``torch.nn.GRU``, which resets the product of the state instead of the state. What its
    steps need of the sentences' vectors is one product, ahead of them.
    """
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear
    from torch.nn.utils.rnn import PackedSequence

    rnn, parameters, (E, W_s, b_s, W, b, U_zr, U_u) = _torch_parameters(weights)
    n = weights["U"].shape[0]

    def prepare(batch):
        batch = sorted(batch, key=lambda document: -len(document[0]))
        found = [words for document, _ in batch for words in document]
        order = sorted(range(len(found)), key=lambda k: -len(found[k]))
        (words,), counts = sentences.packed([(found[k],) for k in order], 1)
        place = np.empty(len(found), np.int64)
        place[order] = np.arange(len(found))
        lengths = np.array([len(document) for document, _ in batch])
        starts = np.cumsum(lengths) - lengths
        alive = [int((lengths > step).sum()) for step in range(lengths[0])]
        rows = np.concatenate([place[starts[:count] + step] for step, count in enumerate(alive)])
        return words, counts, torch.tensor(rows), alive, torch.tensor([label for _, label in batch])

    def loss(prepared):
        words, counts, rows, alive, labels = prepared
        _, ends = rnn(PackedSequence(embedding(words, E, sparse=True), counts))
        s = torch.zeros(len(labels), n)
        for x in linear(ends[0][rows], W, b).split(alive):
            old, rest = s[: len(x)], s[len(x) :]
            z, r = torch.sigmoid(x[:, : 2 * n] + linear(old, U_zr)).chunk(2, 1)
            u = torch.tanh(x[:, 2 * n :] + linear(r * old, U_u))
            s = torch.cat([old + z * (u - old), rest])
        return cross_entropy(linear(s, W_s, b_s), labels, reduction="sum")

    return Program(parameters, loss, prepare)


def torch_one_by_one(weights: Weights) -> Program:
    """``torch.nn.RNN`` on one sentence after another, and the outer step after each."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, linear

    rnn, parameters, (E, W_s, b_s, W, b, U_zr, U_u) = _torch_parameters(weights)
    n = weights["U"].shape[0]

    def document_loss(found, label):
        s = torch.zeros(n)
        for words in found:
            _, end = rnn(embedding(torch.tensor(words), E, sparse=True))
            x = linear(end[0], W, b)
            z, r = torch.sigmoid(x[: 2 * n] + linear(s, U_zr)).chunk(2)
            u = torch.tanh(x[2 * n :] + linear(r * s, U_u))
            s = s + z * (u - s)
        return cross_entropy(linear(s, W_s, b_s), torch.tensor(label), reduction="sum")

    return Program(parameters, lambda batch: sum(document_loss(found, label) for found, label in batch))


PROGRAMS = {
    **own_programs(_dynbatch),
    "dynet": dynet,
    "torch-by-hand": torch_by_hand,
    "torch-one-by-one": torch_one_by_one,
}
