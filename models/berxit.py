"""BERxiT: a transformer encoder that stops at the layer where it is certain; which one that is, is computed.

Ji Xin, Raphael Tang, Yaoliang Yu, Jimmy Lin: "BERxiT: Early Exiting for BERT with Better Fine-Tuning and Extension to
Regression", EACL 2021, with one layer that is applied again and again (Lan and others: "ALBERT", ICLR 2020). After each
layer the certainty of its prediction is read. Under `dy.map` all texts that are not done yet go through the layer
together; those that exit make the batch smaller.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training

SIZES = {"small": 256, "base": 768, "large": 1024}  # width; a head has 64, the feed-forward layer four times the width
HEAD = 64


class Text(NamedTuple):
    """Words, as many in every text, and a class; None where it is not known."""

    words: tuple[str, ...]
    label: int | None


def majorities(count: int, length: int, seed: int = 0) -> list[Text]:
    """Texts of the words a to d and x, whose class is which of a to d is the most frequent; ties do not occur.

    How clear that is differs from text to text.
    """
    random, found = np.random.default_rng(seed), []
    while len(found) < count:
        shares = random.dirichlet([1.0, 1.0, 1.0, 1.0, 2.0])
        words = random.choice(5, length, p=shares)
        *others, most = np.sort(counts := np.bincount(words, minlength=5)[:4])
        if most > others[-1]:
            found.append(Text(tuple("abcdx"[word] for word in words), int(counts.argmax())))
    return found


class EarlyExit(training.Task):
    """One transformer layer (Vaswani and others, 2017), shared by all depths, and what is read off the first word."""

    name = "berxit"
    unit = "texts"
    metric = "dev_accuracy"
    shape_flags = ("hidden", "size", "length")
    demo: ClassVar = {"hidden": 64, "layers": 4, "epochs": 6, "time_limit": 60.0}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(learning_rate=0.001)
        sizes = ", ".join(f"{name} {width}" for name, width in SIZES.items())
        parser.add_argument("--size", choices=SIZES, help=f"instead of --hidden: {sizes}")
        parser.add_argument(
            "--layers", type=training.positive, default=6, metavar="N", help="the most (default: %(default)s)"
        )
        parser.add_argument(
            "--length", type=training.positive, default=32, metavar="N", help="words a text (default: %(default)s)"
        )
        parser.add_argument(
            "--certainty", type=float, default=0.8, metavar="P", help="at which it exits (default: %(default)s)"
        )

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list[Text], list[Text]]:
        texts = majorities(2500, args.length)
        return texts[500:], texts[:500]

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list[Text]:
        """A text a line, its class (a number) in front; cut or filled up to the length."""
        found = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            label, words = None, line.split()
            if labels:
                if not words or not words[0].isdecimal():
                    raise FileFormatError(f"{path}, line {number}: expected a class, a number from 0 on, and words")
                label = int(words.pop(0))
            found.append(Text((*words, *[""] * args.length)[: args.length], label))
        return found

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, train: list[Text]) -> dict:
        words = {word for text in train for word in text.words}
        return {"words": sorted(words), "classes": 1 + max(label for _, label in train if label is not None)}

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        super().__init__(collection, args, vocabulary)
        self.layers, self.certainty = args.layers, args.certainty
        d = self.width = SIZES[args.size] if args.size else args.hidden
        self.heads = max(2, d // HEAD)
        self.word_ids = {word: number for number, word in enumerate(vocabulary["words"], start=1)}  # 0 is unknown
        add = collection.add_parameters
        self.words = add((d, len(self.word_ids) + 1), init=dy.NormalInitializer(0, 1), name="words")
        self.places = add((d, args.length), init=dy.NormalInitializer(0, 1), name="places")
        self.W_q, self.W_k, self.W_v, self.W_o = (add((d, d), name=f"W{name}") for name in "qkvo")
        self.b_q, self.b_k, self.b_v, self.b_o = (add(d, init=0, name=f"b{name}") for name in "qkvo")
        self.W_1, self.b_1 = add((4 * d, d), name="W1"), add(4 * d, init=0, name="b1")
        self.W_2, self.b_2 = add((d, 4 * d), name="W2"), add(d, init=0, name="b2")
        self.g_e, self.g_a, self.g_f = (add(d, init=1, name=f"g{name}") for name in "eaf")
        self.l_e, self.l_a, self.l_f = (add(d, init=0, name=f"l{name}") for name in "eaf")
        self.W_s, self.b_s = add((vocabulary["classes"], d), name="Ws"), add(vocabulary["classes"], init=0, name="bs")
        self.w_c, self.b_c = add((1, d), name="wc"), add(1, init=0, name="bc")

    def trainer(self, learning_rate: float) -> dy.Trainer:
        """Adam, as is usual for transformers."""
        return dy.AdamTrainer(self.collection, alpha=learning_rate)

    @dy.cell
    def embed(self, chosen: dy.Expression) -> dy.Expression:
        """The input of the first layer, a column a word."""
        return dy.layer_norm(chosen + self.places, self.g_e, self.l_e)

    def attend(self, x: dy.Expression) -> dy.Expression:
        """Multi-head attention: every word's mixture of what all words have."""
        q = dy.affine_transform([self.b_q, self.W_q, x])
        k = dy.affine_transform([self.b_k, self.W_k, x])
        v = dy.affine_transform([self.b_v, self.W_v, x])
        mixed, n = [], self.width // self.heads
        for start in range(0, self.width, n):
            q_h, k_h, v_h = (dy.pick_range(m, start, start + n) for m in (q, k, v))
            weights = dy.softmax(dy.transpose(k_h) * q_h * (1 / math.sqrt(n)))  # a column for each word that asks
            mixed.append(v_h * weights)
        return dy.affine_transform([self.b_o, self.W_o, dy.concatenate(mixed)])

    @dy.cell
    def layer(self, x: dy.Expression) -> tuple[dy.Expression, dy.Expression]:
        """The output, and what is said of it: the log-odds that the prediction is right, and the classes' scores."""
        x = dy.layer_norm(x + self.attend(x), self.g_a, self.l_a)
        inner = dy.gelu(dy.affine_transform([self.b_1, self.W_1, x]))
        x = dy.layer_norm(x + dy.affine_transform([self.b_2, self.W_2, inner]), self.g_f, self.l_f)
        first = dy.reshape(dy.pick_range(x, 0, 1, 1), self.width)
        certainty = dy.affine_transform([self.b_c, self.w_c, first])
        return x, dy.concatenate([certainty, dy.affine_transform([self.b_s, self.W_s, first])])

    @dy.cell
    def class_loss(self, said: dy.Expression, label: int) -> dy.Expression:
        return dy.pickneglogsoftmax(said[1:], label)

    @dy.cell
    def certainty_loss(self, said: dy.Expression, is_right: int) -> dy.Expression:
        """The squared distance of the certainty from whether the prediction is right."""
        return dy.square(dy.logistic(said[:1]) - is_right)

    def start(self, words: Sequence[int]) -> dy.Expression:
        return self.embed(dy.select_cols(self.words, words))

    def run(self, words: Sequence[int], exits: Callable[[int, dy.Expression], bool]) -> tuple[int, dy.Expression]:
        """The layer at which a text exits, counted from 1, and what is said there (see `layer`).

        Arguments:
            exits: whether to, from the layer and what is said after it; not asked at the last one.
        """
        x, depth = self.start(words), 1
        x, said = self.layer(x)
        while depth < self.layers and not exits(depth, said):
            x, said = self.layer(x)
            depth += 1
        return depth, said

    def is_certain(self, depth: int, said: dy.Expression) -> bool:
        """Whether the certainty is high enough."""
        return said.vec_value()[0] >= math.log(self.certainty / (1 - self.certainty))  # waits

    def loss(self, text: Text) -> dy.Expression:
        """Of all layers (the joint training of section 3); each certainty is to be whether the prediction is right."""
        assert text.label is not None
        x, said = self.start(self.ids(text.words)), []
        for _ in range(self.layers):
            x, scores = self.layer(x)
            said.append(scores)
        dy.wait(*said)
        right = [int(np.argmax(scores.npvalue()[1:])) == text.label for scores in said]
        losses = [self.class_loss(scores, text.label) for scores in said]
        return dy.average(
            losses + [self.certainty_loss(scores, int(is_right)) for scores, is_right in zip(said, right)]
        )

    def batch_loss(self, instances: list[Text]) -> dy.Expression:
        return dy.esum(dy.map(self.loss, instances))

    def ids(self, words: Sequence[str]) -> list[int]:
        return [self.word_ids.get(word, 0) for word in words]

    def length(self, text: Text) -> int:
        return len(text.words)

    def predict(self, instances: list[Text]) -> list[tuple[int, int]]:
        """Class and layer of each."""
        found = dy.map(lambda text: self.run(self.ids(text.words), self.is_certain), instances)
        dy.forward([said for _, said in found])
        return [(int(np.argmax(said.npvalue()[1:])), depth) for depth, said in found]

    def measure(self, instances: list[Text], predictions: list[tuple[int, int]]) -> dict[str, float]:
        right = sum(text.label == label for text, (label, _) in zip(instances, predictions))
        depths = [depth for _, depth in predictions]
        return {"dev_accuracy": right / len(instances), "mean_layers": sum(depths) / len(depths)}

    def write(self, instances: list[Text], predictions: list[tuple[int, int]]) -> Iterator[str]:
        for label, depth in predictions:
            yield f"{label}\tlayer {depth}"


if __name__ == "__main__":
    sys.exit(training.main(EarlyExit))
