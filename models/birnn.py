"""BiRNN: a tag for every word of a sentence, by a network that reads the sentence in both directions.

Mike Schuster, Kuldip Paliwal: "Bidirectional Recurrent Neural Networks", IEEE Transactions on Signal Processing, 1997.
Both directions are LSTMs (Hochreiter and Schmidhuber 1997) as `dynbatch.VanillaLSTMBuilder` has them. The model is
written for one sentence; sentences of any length batch. Flags, training loop and saving are in `models/training.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.sentences import Sentence, marked_sentences, read_sentences


class Tagger(training.Task):
    """A softmax over the outputs that both directions have at a word."""

    name = "birnn"
    unit = "sentences"
    metric = "dev_accuracy"
    demo: ClassVar = {"hidden": 64, "epochs": 4, "time_limit": 75.0}

    @classmethod
    def data(cls, args: argparse.Namespace) -> tuple[list[Sentence], list[Sentence]]:
        """With no train.txt in the folder, every tenth sentence of dev.txt is for dev, and the others to train on."""
        if args.data is None:
            sentences = marked_sentences(5000)
            return sentences[500:], sentences[:500]
        train, dev = Path(args.data) / "train.txt", Path(args.data) / "dev.txt"
        if train.exists():
            return cls.read(train, args), cls.read(dev, args)
        sentences = cls.read(dev, args)
        if len(sentences) < 2:
            raise FileFormatError(f"{dev}: one sentence is too few to train and to evaluate; there is no train.txt")
        return [s for k, s in enumerate(sentences) if k % 10], sentences[::10]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Sentence]:
        return read_sentences(path, labels)

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, sentences: list[Sentence]) -> dict:
        words = {word for sentence in sentences for word in sentence.words}
        tags = {tag for sentence in sentences for tag in sentence.tags}
        return {"words": sorted(words), "tags": sorted(tags)}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        self.tags = vocabulary["tags"]
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        self.tag_ids = {tag: number for number, tag in enumerate(self.tags)}
        self.embeddings = collection.add_lookup_parameters((len(self.word_ids) + 1, args.hidden), name="embeddings")
        self.forward = dy.VanillaLSTMBuilder(1, args.hidden, args.hidden, collection)
        self.backward = dy.VanillaLSTMBuilder(1, args.hidden, args.hidden, collection)
        self.W_s = collection.add_parameters((len(self.tags), 2 * args.hidden), name="Ws")
        self.b_s = collection.add_parameters(len(self.tags), init=0, name="bs")

    def encode(self, words: list[int]) -> Iterator[tuple[dy.Expression, dy.Expression]]:
        """At each word, the outputs of the forward direction, which has read up to it, and of the backward one."""
        xs = [self.embeddings[word] for word in words]
        outputs = self.forward.initial_state().transduce(xs)
        reversed_outputs = self.backward.initial_state().transduce(xs[::-1])
        return zip(outputs, reversed_outputs[::-1])

    @dy.cell
    def scores(self, h_f: dy.Expression, h_b: dy.Expression) -> dy.Expression:
        return dy.affine_transform([self.b_s, self.W_s, dy.concatenate([h_f, h_b])])

    @dy.cell
    def word_loss(self, h_f: dy.Expression, h_b: dy.Expression, tag: int) -> dy.Expression:
        return dy.pickneglogsoftmax(self.scores(h_f, h_b), tag)

    def numbers(self, sentence: Sentence) -> list[int]:
        """The numbers of the words."""
        return [self.word_ids.get(word, 0) for word in sentence.words]

    def loss(self, sentence: Sentence) -> dy.Expression:
        encoded = zip(self.encode(self.numbers(sentence)), sentence.tags)
        return dy.esum([self.word_loss(h_f, h_b, self.tag_ids[tag]) for (h_f, h_b), tag in encoded])

    def length(self, sentence: Sentence) -> int:
        return len(sentence.words)

    def predict(self, sentences: list[Sentence]) -> list[tuple[str, ...]]:
        scores = [[self.scores(*hs) for hs in self.encode(self.numbers(sentence))] for sentence in sentences]
        dy.forward([score for of_sentence in scores for score in of_sentence])
        return [tuple([self.tags[int(score.argmax_value())] for score in of_sentence]) for of_sentence in scores]

    def measure(self, sentences: list[Sentence], predictions: list[tuple[str, ...]]) -> dict[str, float]:
        pairs = [pair for sentence, tags in zip(sentences, predictions) for pair in zip(sentence.tags, tags)]
        return {"dev_accuracy": sum(gold == tag for gold, tag in pairs) / len(pairs)}

    def write(self, sentences: list[Sentence], predictions: list[tuple[str, ...]]) -> Iterator[str]:
        for sentence, tags in zip(sentences, predictions):
            yield " ".join(f"{word}|{tag}" for word, tag in zip(sentence.words, tags))


if __name__ == "__main__":
    sys.exit(training.main(Tagger))
