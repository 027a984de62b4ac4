"""The encoder with early exits of `models.berxit`: at most 18 layers on texts of 128 words, widths 256, 768 and 1024.

An instance is (words, layer). The weights are random, and certain of nothing or of everything; so the log-odds that are
read after a layer are shifted by `SURE`, down before the instance's layer and up from there, as training would. Layers
are spread evenly. The loss is that of the class with the highest score. What comes next depends on values, so DyNet and
PyTorch run one text after another; a text is a matrix, which is where PyTorch is good at.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import sentences
from bench.models import Program, own_mapped_programs, without_cells
from bench.sentences import Weights

UNIT = "texts"
MODES = ("infer",)  # training changes decisions that were close
LAYERS, LENGTH, CLASSES = 18, 128, 4
GENERATED = 512  # texts
WORDS = 1000
HEAD = 64  # width of a head; at least two heads
SURE = 100.0  # in log-odds
SQUARES = {"W_q": (1, 1), "W_k": (1, 1), "W_v": (1, 1), "W_o": (1, 1), "W_1": (4, 1), "W_2": (1, 4)}  # times the width
BIASES = {"b_q": 1, "b_k": 1, "b_v": 1, "b_o": 1, "b_1": 4, "b_2": 1, "l_e": 1, "l_a": 1, "l_f": 1}
GAINS = ("g_e", "g_a", "g_f")


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """Generated texts; those of ``folder`` / train.txt, with layers drawn, where it is given. Sizes: of everything."""
    random = np.random.default_rng(1)
    sizes = {"words": WORDS, "classes": CLASSES, "length": LENGTH}
    if folder is None:
        texts = random.integers(WORDS, size=(GENERATED, LENGTH)).tolist()
    else:
        from models.berxit import EarlyExit

        train, _ = EarlyExit.data(Namespace(data=folder, length=LENGTH))
        vocabulary = EarlyExit.vocabulary(Namespace(), train)
        numbers = {word: number for number, word in enumerate(vocabulary["words"], start=1)}
        texts = [[numbers[word] for word in words] for words, _ in train]
        sizes |= {"words": 1 + len(numbers), "classes": vocabulary["classes"]}
    return [(tuple(words), int(random.integers(1, LAYERS + 1))) for words in texts], sizes


def weights(hidden: int, sizes: dict[str, int], random: np.random.Generator) -> Weights:
    """By the names of `models.berxit`; gains near one."""
    d = hidden
    shapes: dict[str, tuple[int, ...]] = {"words": (d, sizes["words"]), "places": (d, sizes["length"])}
    shapes |= {name: (rows * d, columns * d) for name, (rows, columns) in SQUARES.items()}
    shapes |= {name: (size * d,) for name, size in BIASES.items()} | dict.fromkeys(GAINS, (d,))
    shapes |= {"W_s": (sizes["classes"], d), "b_s": (sizes["classes"],), "w_c": (1, d), "b_c": (1,)}
    found = sentences.draw(shapes, hidden, random)
    for name in GAINS:
        found[name] += 1
    return found


def flops(instance: tuple, hidden: int, sizes: dict[str, int]) -> float:
    """Of each layer that the text goes through: its matrices, and attention."""
    words, layer = instance
    return 2.0 * layer * len(words) * hidden * (12 * hidden + 2 * len(words))


def exits(certainty: float, depth: int, layer: int) -> bool:
    """Whether a text whose layer this is exits at this depth."""
    return certainty + (SURE if depth >= layer else -SURE) >= 0


def _dynbatch(weights: Weights, cells: bool) -> tuple[list, Callable[[Any], Any], Any]:
    import dynbatch as dy
    from models.berxit import EarlyExit

    (hidden, words), classes = weights["words"].shape, len(weights["b_s"])
    flags = Namespace(hidden=hidden, size=None, layers=LAYERS, length=weights["places"].shape[1], certainty=0.5)
    collection = dy.ParameterCollection()
    task = EarlyExit(collection, flags, {"words": range(1, words), "classes": classes})
    if not cells:
        without_cells(task)

    def text_loss(instance):
        words, layer = instance
        _, said = task.run(words, lambda depth, said: exits(said.vec_value()[0], depth, layer))
        return task.class_loss(said, int(said.npvalue()[1:].argmax()))

    return [(getattr(task, name), value) for name, value in weights.items()], text_loss, collection


def dynet(weights: Weights) -> Program:
    """The same in DyNet, which has no normalization of a matrix's columns and no GELU: both are put together."""
    import dynet as dy

    collection = dy.ParameterCollection()
    p = {name: collection.add_parameters(value.shape) for name, value in weights.items()}
    (d, length), n = weights["places"].shape, weights["places"].shape[0] // max(2, weights["places"].shape[0] // HEAD)

    def affine(bias, matrix, x):
        return dy.colwise_add(p[matrix] * x, p[bias])

    def normalized(x, gain, bias):
        centered = x - dy.ones((d, 1)) * dy.reshape(dy.mean_dim(x, [0], False), (1, length))
        deviation = dy.reshape(dy.std_dim(x, [0], False), (1, length))
        return dy.colwise_add(dy.cmult(dy.cdiv(centered, deviation), p[gain]), p[bias])

    def layer(x):
        q, k, v = (affine(f"b_{name}", f"W_{name}", x) for name in "qkv")
        mixed = []
        for start in range(0, d, n):
            q_h, k_h, v_h = (dy.pick_range(m, start, start + n) for m in (q, k, v))
            mixed.append(v_h * dy.softmax(dy.transpose(k_h) * q_h * (1 / math.sqrt(n))))
        x = normalized(x + affine("b_o", "W_o", dy.concatenate(mixed)), "g_a", "l_a")
        inner = affine("b_1", "W_1", x)
        inner = dy.cmult(inner * 0.5, dy.erf(inner * math.sqrt(0.5)) + 1)
        x = normalized(x + affine("b_2", "W_2", inner), "g_f", "l_f")
        return x, dy.pick(x, 0, 1)

    def text_loss(words, wanted):
        x = normalized(dy.select_cols(p["words"], words) + p["places"], "g_e", "l_e")
        for depth in range(1, LAYERS + 1):
            x, first = layer(x)
            if depth < LAYERS and exits((p["w_c"] * first + p["b_c"]).value(), depth, wanted):
                break
        scores = p["W_s"] * first + p["b_s"]
        return dy.pickneglogsoftmax(scores, int(scores.npvalue().argmax()))

    def loss(batch):
        return dy.esum([text_loss(list(words), wanted) for words, wanted in batch])

    return Program([(p[name], value) for name, value in weights.items()], loss, collection=collection)


def torch_one_by_one(weights: Weights) -> Program:
    """The same in PyTorch, with queries, keys and values in one product, and PyTorch's own attention."""
    import torch
    from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear, scaled_dot_product_attention

    d, length = weights["places"].shape
    heads = max(2, d // HEAD)
    values = {name: value for name, value in weights.items() if name[2:] not in ("q", "k", "v")}
    values |= {"words": weights["words"].T, "places": weights["places"].T}
    values |= {kind: np.concatenate([weights[f"{kind}_{name}"] for name in "qkv"]) for kind in "Wb"}
    tensors = sentences.torch_tensors(values, tuple(values))
    p = {name: tensor for name, (tensor, _) in tensors.items()}

    def normalized(x, kind):
        return layer_norm(x, (d,), p[f"g_{kind}"], p[f"l_{kind}"], eps=1e-12)

    def layer(x):
        q, k, v = linear(x, p["W"], p["b"]).view(length, 3, heads, d // heads).permute(1, 2, 0, 3)
        mixed = scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).reshape(length, d)
        x = normalized(x + linear(mixed, p["W_o"], p["b_o"]), "a")
        inner = gelu(linear(x, p["W_1"], p["b_1"]))
        return normalized(x + linear(inner, p["W_2"], p["b_2"]), "f")

    def text_loss(words, wanted):
        x = normalized(embedding(torch.tensor(words), p["words"]) + p["places"], "e")
        for depth in range(1, LAYERS + 1):
            x = layer(x)
            if depth < LAYERS and exits(linear(x[0], p["w_c"], p["b_c"]).item(), depth, wanted):
                break
        scores = linear(x[:1], p["W_s"], p["b_s"])
        return cross_entropy(scores, scores.argmax(1))

    return Program(list(tensors.values()), lambda batch: sum(text_loss(*instance) for instance in batch))


PROGRAMS = {
    **own_mapped_programs(_dynbatch),
    "dynet": dynet,
    "torch-one-by-one": torch_one_by_one,
}
