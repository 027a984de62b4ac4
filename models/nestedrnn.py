"""NestedRNN: the class of a document, by a recurrent network over its sentences and another one over their words.

The model of Fegade et al., "ACRoBat: Optimizing Auto-batching of Dynamic Deep Learning at Compile Time", 2023, where an
RNN loop runs inside of a GRU loop and both have 20 to 40 steps. The inner network is Elman's ("Finding Structure in
Time", 1990), the outer one a gated recurrent unit (Cho et al., "Learning Phrase Representations using RNN
Encoder-Decoder", 2014). The model is written for one document. Flags, training loop and saving are in
`models/training.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import dynbatch as dy
from models import training
from models.documents import Document, generate, read_documents


class NestedRNN:
    """From the words of sentences to one vector; words, sentences and documents have vectors of size `hidden`."""

    def __init__(self, collection: dy.ParameterCollection, words: int, hidden: int) -> None:
        def matrix(name: str) -> dy.Parameter:
            return collection.add_parameters((hidden, hidden), name=name)

        def bias(name: str) -> dy.Parameter:
            return collection.add_parameters(hidden, init=0, name=name)

        self.hidden = hidden
        self.embeddings = collection.add_lookup_parameters((words, hidden), name="embeddings")
        self.W, self.U, self.b = matrix("W"), matrix("U"), bias("b")
        self.W_z, self.U_z, self.b_z = matrix("Wz"), matrix("Uz"), bias("bz")
        self.W_r, self.U_r, self.b_r = matrix("Wr"), matrix("Ur"), bias("br")
        self.W_u, self.U_u, self.b_u = matrix("Wu"), matrix("Uu"), bias("bu")

    @dy.cell
    def read(self, h: dy.Expression, word: int) -> dy.Expression:
        """A step of the inner network: the state after one more word."""
        x = self.embeddings[word]
        return dy.tanh(dy.affine_transform([self.b, self.W, x, self.U, h]))

    @dy.cell
    def advance(self, s: dy.Expression, x: dy.Expression) -> dy.Expression:
        """A step of the outer network: the state after one more sentence, whose vector is x."""
        z = dy.logistic(dy.affine_transform([self.b_z, self.W_z, x, self.U_z, s]))
        r = dy.logistic(dy.affine_transform([self.b_r, self.W_r, x, self.U_r, s]))
        u = dy.tanh(dy.affine_transform([self.b_u, self.W_u, x, self.U_u, dy.cmult(r, s)]))
        return dy.cmult(1 - z, s) + dy.cmult(z, u)

    def encode(self, sentences: Sequence[Sequence[int]]) -> dy.Expression:
        """The vector of a document, from the numbers of its words."""
        read, advance = self.read, self.advance
        start = s = dy.zeros(self.hidden)
        for words in sentences:
            h = start
            for word in words:
                h = read(h, word)
            s = advance(s, h)
        return s


class DocumentClassifier(training.Task):
    """A softmax over the vector of a document."""

    name = "nestedrnn"
    unit = "documents"
    metric = "dev_accuracy"
    demo: ClassVar = {"hidden": 64, "steps": [5, 10], "epochs": 4, "time_limit": 75.0}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--steps",
            type=training.positive,
            nargs=2,
            default=[20, 40],
            metavar="N",
            help="least and most sentences of a generated document, and words of a sentence (default: 20 40)",
        )

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list[Document], list[Document]]:
        documents = generate(2500, *sorted(args.steps))
        return documents[500:], documents[:500]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Document]:
        return read_documents(path, labels)

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, documents: list[Document]) -> dict:
        words = {word for document in documents for sentence in document.sentences for word in sentence}
        return {"words": sorted(words), "classes": 1 + max(document.label for document in documents)}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        self.encoder = NestedRNN(collection, len(self.word_ids) + 1, args.hidden)
        self.W_s = collection.add_parameters((vocabulary["classes"], args.hidden), name="Ws")
        self.b_s = collection.add_parameters(vocabulary["classes"], init=0, name="bs")

    def encode(self, document: Document) -> dy.Expression:
        """The vector of a document."""
        number = self.word_ids.get
        return self.encoder.encode([[number(word, 0) for word in sentence] for sentence in document.sentences])

    @dy.cell
    def scores(self, s: dy.Expression) -> dy.Expression:
        return dy.affine_transform([self.b_s, self.W_s, s])

    @dy.cell
    def document_loss(self, s: dy.Expression, label: int) -> dy.Expression:
        return dy.pickneglogsoftmax(self.scores(s), label)

    def loss(self, document: Document) -> dy.Expression:
        return self.document_loss(self.encode(document), document.label)

    def predict(self, documents: list[Document]) -> list[int]:
        scores = [self.scores(self.encode(document)) for document in documents]
        dy.forward(scores)
        return [int(score.argmax_value()) for score in scores]

    def measure(self, documents: list[Document], predictions: list[int]) -> dict[str, float]:
        correct = sum(document.label == label for document, label in zip(documents, predictions))
        return {"dev_accuracy": correct / len(documents)}


if __name__ == "__main__":
    sys.exit(training.main(DocumentClassifier))
