"""The encoder with early exits: it learns, is certain sooner or later, and does the same however it is run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.berxit import EarlyExit, majorities
from tests.one_by_one import assert_equal, looped, made, outcome


def test_learns_and_exits_early_without_losing_accuracy(tmp_path):
    report, model = tmp_path / "report.json", tmp_path / "model"
    flags = f"--hidden 32 --layers 3 --length 16 --epochs 4 --batch-size 32 --json {report} --save {model}"
    assert training.main(EarlyExit, flags.split()) == 0
    early = json.loads(report.read_text())
    assert early["dev_accuracy"] > 0.85
    flags = f"--load {model} --evaluate --json {report} --certainty"
    assert training.main(EarlyExit, [*flags.split(), "0.9999"]) == 0
    late = json.loads(report.read_text())
    assert early["mean_layers"] < 2.5 < late["mean_layers"] <= 3
    assert late["dev_accuracy"] - early["dev_accuracy"] < 0.1


@pytest.mark.usefixtures("float64")
def test_every_way_to_run_it_agrees():
    texts = majorities(8, 6, seed=2)
    task = made(EarlyExit, "--hidden 8 --layers 4 --length 6", texts)
    task.w_c.set_value(np.full((1, 8), 1.0))  # so that certainties differ
    taken, expected = [], None

    def exiting(text):
        depth, said = task.run(task.ids(text.words), task.is_certain)
        return depth, said, task.class_loss(said, int(np.argmax(said.npvalue()[1:])))

    def decided(way):
        """The losses of the classes that come out, and the layers, which are noted."""
        results = way(exiting, texts)
        taken.append([depth for depth, _, _ in results])
        return [loss for _, _, loss in results]

    training_losses = None
    task.certainty = 0.5
    for strategy in ("off", "depth", "agenda"):
        for way in (dy.map, looped):
            with dy.autobatch(strategy):
                found = outcome(task, lambda way=way: decided(way))
                expected = expected or found
                assert_equal(found, expected)
                found = outcome(task, lambda way=way: way(task.loss, texts))
                training_losses = training_losses or found
                assert_equal(found, training_losses)
    assert all(depths == taken[0] for depths in taken) and len(set(taken[0])) > 1

    def replayed():
        """The same decisions, recorded before."""
        for text, wanted in zip(texts, taken[0]):
            _, said = task.run(task.ids(text.words), lambda depth, said, wanted=wanted: depth == wanted)
            yield task.class_loss(said, int(np.argmax(said.npvalue()[1:])))

    assert_equal(outcome(task, lambda: list(replayed())), expected)


def test_a_layer_computes_the_papers_equations():
    texts = majorities(3, 5)
    task = made(EarlyExit, "--hidden 8 --layers 2 --length 5", texts)
    p = {name: value.as_array() for name, value in vars(task).items() if isinstance(value, dy.Parameter)}

    def normalized(x, kind):
        centered = x - x.mean(0)
        return p[f"g_{kind}"][:, None] * centered / centered.std(0) + p[f"l_{kind}"][:, None]

    def affine(kind, x):
        return p[f"W_{kind}"] @ x + p[f"b_{kind}"][:, None]

    x = np.random.default_rng(1).standard_normal((8, 5))
    expected = []
    for start in (0, 4):
        q, k, v = (affine(kind, x)[start : start + 4] for kind in "qkv")
        weights = np.exp(k.T @ q / 2)
        expected.append(v @ (weights / weights.sum(0)))
    y = normalized(x + affine("o", np.concatenate(expected)), "a")
    inner = affine("1", y)
    inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
    y = normalized(y + affine("2", inner), "f")
    dy.renew_cg()
    found, said = task.layer(dy.inputTensor(x))
    np.testing.assert_allclose(found.npvalue(), y, rtol=1e-4, atol=1e-5)
    scores = np.concatenate([p["w_c"] @ y[:, 0] + p["b_c"], p["W_s"] @ y[:, 0] + p["b_s"]])
    np.testing.assert_allclose(said.npvalue(), scores, rtol=1e-4, atol=1e-5)


def test_texts_that_exit_make_the_batch_smaller():
    texts = majorities(12, 6)
    task = made(EarlyExit, "--hidden 8 --layers 5 --length 6", texts)
    wanted = {text.words: 1 + k % 5 for k, text in enumerate(texts)}

    def run(text):
        def exits(depth, said):
            said.value()
            return depth == wanted[text.words]

        return task.run(task.ids(text.words), exits)[0]

    with dy.no_grad():
        depths = dy.map(run, texts)
    assert depths == [wanted[text.words] for text in texts]
    waiting = [r.instances for r in dy.plan("map").rounds]
    assert waiting == [sum(depth >= k for depth in depths) for k in range(1, 5)]


def test_sizes_and_files(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("1 a b c\n0 d\n")
    args = training.parse(EarlyExit, ["--length", "2"])
    assert [(text.words, text.label) for text in EarlyExit.read(path, args)] == [(("a", "b"), 1), (("d", ""), 0)]
    path.write_text("a b\n")
    assert EarlyExit.read(path, args, labels=False)[0].words == ("a", "b")
    with pytest.raises(FileFormatError, match=r"train\.txt, line 1"):
        EarlyExit.read(path, args)
    small = made(EarlyExit, "--size small --length 4", majorities(5, 4))
    assert (small.width, small.heads) == (256, 4)
