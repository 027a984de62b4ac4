"""A transition-based dependency parser: it reads a sentence from left to right and decides arc by arc.

Training follows the parser's own choices, right or wrong (Yoav Goldberg, Joakim Nivre: "Training Deterministic Parsers
with Non-Deterministic Oracles", TACL 2013), so nothing behind a choice can be computed before that is made. The model
is written for one sentence all the same, and `dy.map` batches. The transitions are in `models/arc_hybrid.py`, what a
choice is made from in `models/parser_features.py`, the format of the files in `models/conllu.py`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import dynbatch as dy
from dynbatch.errors import FileFormatError
from dynbatch.graph import next_key
from models import training
from models.arc_hybrid import Actions, Configuration, Oracle, is_projective
from models.conllu import Sentence, check_tree, read_conllu, written
from models.parser_features import BiLSTMFeatures, StackLSTMFeatures
from models.treebank import generated_treebank

UNKNOWN, ROOT = range(2)
"""The first numbers of words, endings and tags."""

FEATURES = {"bilstm": BiLSTMFeatures, "stack": StackLSTMFeatures}


class Derivation(NamedTuple):
    """A derivation so far.

    Attributes:
        score: the sum of its transitions' log probabilities.
        c: what it has come to.
        memory: what the features remember of it.
    """

    score: float
    c: Configuration
    memory: Any


class Parser(training.Task):
    """A dependency tree for a sentence."""

    name = "parser"
    unit = "sentences"
    metric = "las"
    shape_flags = ("hidden", "features")
    maps = True
    demo: ClassVar = {"hidden": 64, "epochs": 3, "time_limit": 75.0}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(learning_rate=0.002, batch_size=32)
        add = parser.add_argument
        add("--features", choices=tuple(FEATURES), default="bilstm", help="what to decide from (default: %(default)s)")
        add("--beam", type=training.positive, default=1, metavar="N", help="derivations to keep (default: %(default)s)")
        add(
            "--explore",
            type=float,
            default=0.9,
            metavar="RATE",
            help="how often training follows a choice that is wrong (default: %(default)s)",
        )
        add(
            "--word-dropout",
            type=float,
            default=0.5,
            metavar="A",
            help="a word seen n times in training is unknown at the rate A / (A + n) (default: %(default)s)",
        )

    @classmethod
    def data(cls, args: argparse.Namespace) -> tuple[list[Sentence], list[Sentence]]:
        if args.data is None:
            sentences = generated_treebank(2500)
            train, test = sentences[500:], sentences[:500]
        else:
            train, test = (cls.read(path, args) for path in treebank_files(Path(args.data)))
        projective = [sentence for sentence in train if is_projective(sentence.heads)]
        if len(projective) < len(train):
            skipped = len(train) - len(projective)
            print(f"{skipped:,} of {len(train):,} training sentences are left out: their trees are not projective")
        if not projective:
            raise FileFormatError(f"{train[0].place}: no tree from here on is projective, so there is none to train on")
        return projective, test

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Sentence]:
        sentences = read_conllu(path)
        if labels:
            for sentence in sentences:
                check_tree(sentence)
        return sentences

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, train: list[Sentence]) -> dict:
        words = Counter(form.lower() for sentence in train for form in sentence.forms)
        endings = Counter(ending(form) for sentence in train for form in sentence.forms)
        return {
            "words": dict(sorted(words.items())),
            "endings": sorted(e for e, count in endings.items() if count > 1),
            "tags": sorted({tag for sentence in train for tag in sentence.tags}),
            "labels": sorted({str(label) for sentence in train for label in sentence.labels}),
        }

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        self.beam, self.explore, self.word_dropout = args.beam, args.explore, args.word_dropout
        self.counts = vocabulary["words"]
        self.word_ids, self.ending_ids, self.tag_ids = (
            {name: number for number, name in enumerate(vocabulary[kind], start=ROOT + 1)}
            for kind in ("words", "endings", "tags")
        )
        self.labels = vocabulary["labels"]
        self.label_ids = {label: number for number, label in enumerate(self.labels)}
        sizes = {"words": 100, "endings": 50, "tags": 50}
        self.words, self.endings, self.tags = (
            collection.add_lookup_parameters((len(vocabulary[kind]) + ROOT + 1, size), name=kind)
            for kind, size in sizes.items()
        )
        self.actions = Actions(len(self.labels))
        self.features = FEATURES[args.features](collection, sum(sizes.values()), args.hidden, len(self.actions.table))

    def trainer(self, learning_rate: float) -> dy.Trainer:
        return dy.AdamTrainer(self.collection, alpha=learning_rate)

    # ---- a sentence --------------------------------------------------------------------------------------------------

    @dy.cell
    def embed(self, word: int, ending: int, tag: int) -> dy.Expression:
        return dy.concatenate([self.words[word], self.endings[ending], self.tags[tag]])

    def inputs(self, sentence: Sentence, drop: random.Random | None = None) -> list[dy.Expression]:
        """A vector for each word, and one for the root behind them."""
        xs = []
        for form, tag in zip(sentence.forms, sentence.tags):
            lower = form.lower()
            word = self.word_ids.get(lower, UNKNOWN)
            if drop is not None and drop.random() * (self.word_dropout + self.counts.get(lower, 0)) < self.word_dropout:
                word = UNKNOWN
            xs.append(self.embed(word, self.ending_ids.get(ending(form), UNKNOWN), self.tag_ids.get(tag, UNKNOWN)))
        return [*xs, self.embed(ROOT, ROOT, ROOT)]

    def loss(self, sentence: Sentence) -> dy.Expression:
        """The errors of one derivation, which goes where the parser goes (Goldberg and Nivre 2013, algorithm 3)."""
        chance = random.Random(next_key())
        oracle = Oracle(sentence.heads)
        labels = self.label_numbers(sentence)
        c, memory = Configuration(len(sentence)), self.features.begin(self.inputs(sentence, chance))
        errors = []
        while not c.is_final:
            scores = self.features.scores(memory, c)
            right, chosen = self.actions.decide(scores.npvalue(), c, oracle, labels)
            errors.append(dy.pickneglogsoftmax(scores, right))
            if chosen != right and chance.random() > self.explore:
                chosen = right
            transition, label = self.actions.table[chosen]
            c, memory = c.take(transition, label), self.features.after(memory, transition, chosen)
        return dy.esum(errors)

    def label_numbers(self, sentence: Sentence) -> list[int]:
        unknown = next((label for label in sentence.labels if label not in self.label_ids), None)
        if unknown is not None:
            raise FileFormatError(f"{sentence.place}: the model was saved without the label {unknown}")
        return [self.label_ids[label] for label in sentence.labels]

    def greedy(self, sentence: Sentence) -> Configuration:
        """The derivation that takes the best action each time."""
        c, memory = Configuration(len(sentence)), self.features.begin(self.inputs(sentence))
        while not c.is_final:
            action = self.actions.best(self.features.scores(memory, c).npvalue(), c.legal())
            transition, label = self.actions.table[action]
            c, memory = c.take(transition, label), self.features.after(memory, transition, action)
        return c

    def beam_search(self, sentence: Sentence, size: int) -> Configuration:
        """The best of as many derivations as are kept at a time; each takes as many transitions as the others."""
        beam = [Derivation(0.0, Configuration(len(sentence)), self.features.begin(self.inputs(sentence)))]
        while not beam[0].c.is_final:
            scores = [self.features.scores(memory, c) for _, c, memory in beam]
            dy.wait(*scores)
            longer = []
            for derivation, e in zip(beam, scores):
                actions = self.actions.numbers[derivation.c.legal()]
                log_p = log_softmax(e.npvalue()[actions])
                longer += [(derivation.score + log_p[k], derivation, actions[k]) for k in (-log_p).argsort()[:size]]
            longer.sort(key=lambda entry: -entry[0])
            beam = []
            for score, (_, c, memory), action in longer[:size]:
                transition, label = self.actions.table[action]
                after = self.features.after(memory, transition, action)
                beam.append(Derivation(score, c.take(transition, label), after))
        return beam[0].c

    # ---- a minibatch -------------------------------------------------------------------------------------------------

    def batch_loss(self, sentences: list[Sentence]) -> dy.Expression:
        return dy.esum(self.each(self.loss, sentences))

    def length(self, sentence: Sentence) -> int:
        return len(sentence)

    def predict(self, sentences: list[Sentence]) -> list[Sentence]:
        def parse(sentence: Sentence) -> Sentence:
            c = self.greedy(sentence) if self.beam == 1 else self.beam_search(sentence, self.beam)
            heads, labels = c.tree()
            return sentence.with_tree(heads, [self.labels[label] for label in labels])

        return self.each(parse, sentences)

    def measure(self, sentences: list[Sentence], predictions: list[Sentence]) -> dict[str, float]:
        return attachment(sentences, predictions)

    def write(self, sentences: list[Sentence], predictions: list[Sentence]) -> Iterator[str]:
        return written(predictions)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log probabilities."""
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())


def ending(form: str) -> str:
    """What an unknown word is known by: its last letters, and whether it begins with a capital."""
    return form[-3:].lower() + ("^" if form[:1].isupper() else "")


def attachment(gold: Sequence[Sentence], parsed: Sequence[Sentence]) -> dict[str, float]:
    """The shares of all words, punctuation too, that have the right head (uas), and the right label too (las)."""
    words = heads = both = 0
    for sentence, found in zip(gold, parsed, strict=True):
        words += len(sentence)
        right = [a == b for a, b in zip(sentence.heads, found.heads, strict=True)]
        heads += sum(right)
        both += sum(r and a == b for r, a, b in zip(right, sentence.labels, found.labels, strict=True))
    return {"uas": heads / words, "las": both / words}


def treebank_files(folder: Path) -> tuple[Path, Path]:
    """The files to train on and to measure on: ``train.conllu`` and ``dev.conllu``, else ``dev.conllu`` and
    ``test.conllu``."""
    if (folder / "train.conllu").exists():
        return folder / "train.conllu", folder / "dev.conllu"
    return folder / "dev.conllu", folder / "test.conllu"


if __name__ == "__main__":
    sys.exit(training.main(Parser))
