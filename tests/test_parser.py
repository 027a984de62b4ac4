"""The dependency parser: that it learns, that dy.map changes nothing but the speed, and its command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dynbatch as dy
from bench import measure
from bench.models import parser as bench_parser
from bench.worker import Job, Session
from dynbatch.config import config
from models import training
from models.arc_hybrid import Actions, Configuration, is_projective
from models.conllu import Sentence, check_tree, read_conllu, written
from models.parser import FEATURES, Parser, attachment
from models.treebank import generated_treebank

ROOT = Path(__file__).parent.parent
NOT_PROJECTIVE = Sentence("abcd", "XXXX", [3, 4, 0, 3], ["x", "y", "root", "z"])


def command(*flags, status=0):
    """Runs the command line as a user does, in a process of its own, which compiles nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "models.parser", *map(str, flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"DYNBATCH_COMPILE": "never"},
    )
    assert done.returncode == status, done.stderr
    return done


def write(path, sentences):
    path.write_text("".join(f"{line}\n" for line in written(sentences)), encoding="utf-8")


def parser(*flags, sentences):
    """A parser that was not trained."""
    args = training.parse(Parser, list(flags))
    return Parser(dy.ParameterCollection(), args, Parser.vocabulary(args, sentences))


def gradients(task):
    collection = task.collection
    found = [p.grad_as_array() for p in (*collection.parameters_list(), *collection.lookup_parameters_list())]
    collection.reset_gradient()
    return found


def fresh():
    """A new graph that draws what the last one drew."""
    dy.renew_cg()
    config.draws = 0


@pytest.fixture(scope="module", params=sorted(FEATURES))
def trained(request, tmp_path_factory):
    """A model trained on generated sentences, its report and its output."""
    folder = tmp_path_factory.mktemp(request.param)
    epochs = 4 if request.param == "bilstm" else 3
    flags = ["--features", request.param, "--hidden", 32, "--epochs", epochs, "--limit", 600, "--learning-rate", 0.01]
    done = command(*flags, "--save", folder / "model", "--json", folder / "report.json")
    return folder, json.loads((folder / "report.json").read_text()), done


def test_learns_the_grammar(trained):
    _, report, done = trained
    assert report["las"] == max(report["las_per_epoch"])
    assert 0.9 < report["las"] <= report["uas"] <= 1
    assert report["sentences_per_s"] > 0 and 1 < report["batches"] < report["nodes"] / 5
    assert f"las {report['las']:.4f}" in done.stdout.splitlines()[-1]


def test_predict_writes_the_file_with_heads(trained, tmp_path):
    folder, _, _ = trained
    sentences = generated_treebank(40, seed=5)
    write(tmp_path / "bare.conllu", [s.with_tree([None] * len(s), [None] * len(s)) for s in sentences])
    text = (tmp_path / "bare.conllu").read_text()
    extra = ["# a comment", "1-2\tUnknown's\t" + "\t".join("_" * 8)]
    extra += [
        "\t".join([str(k), form, "_", tag, *"______"]) for k, form, tag in [(1, "Unknown", "NEW"), (2, "'s", "X")]
    ]
    extra += ["2.1\tempty\t" + "\t".join("_" * 8)]
    (tmp_path / "bare.conllu").write_text("\n".join([text, *extra, "", ""]))

    done = command("--load", folder / "model", "--predict", tmp_path / "bare.conllu")
    (tmp_path / "parsed.conllu").write_text(done.stdout)
    parsed = read_conllu(tmp_path / "parsed.conllu")
    for sentence in parsed:
        check_tree(sentence)
    assert attachment(sentences, parsed[:40])["las"] > 0.85
    assert [s.forms for s in parsed[:40]] == [s.forms for s in sentences]
    lines = done.stdout.split("\n")[-len(extra) - 2 : -2]
    assert lines[:2] == extra[:2] and lines[4] == extra[4] and lines[2].startswith("1\tUnknown\t_\tNEW\t_\t_\t")


def test_evaluate_with_and_without_map_and_with_a_beam(trained, tmp_path):
    folder, _, _ = trained
    figures = {}
    for flags in ([], ["--one-by-one"], ["--beam", 4], ["--beam", 4, "--one-by-one"]):
        command("--load", folder / "model", "--evaluate", "--limit", 100, *flags, "--json", tmp_path / "r.json")
        found = json.loads((tmp_path / "r.json").read_text())
        figures[tuple(flags)] = found["las"], found["uas"]
    assert figures[()] == figures["--one-by-one",]
    assert figures["--beam", 4] == figures["--beam", 4, "--one-by-one"]
    assert figures["--beam", 4][0] > figures[()][0] - 0.02


class Replayed(Actions):
    """Decides as it did before, so that rounding cannot send two runs on different ways."""

    def __init__(self, labels):
        super().__init__(labels)
        self.decisions = {}

    def decide(self, scores, c, oracle, labels):
        key = tuple(oracle.heads), tuple(labels), 2 * c.front - len(c.stack)  # the last is how many it took
        if key not in self.decisions:
            self.decisions[key] = super().decide(scores, c, oracle, labels)
        return self.decisions[key]


@pytest.mark.parametrize("features", sorted(FEATURES))
def test_strategies_and_a_loop_agree_in_values_and_gradients(features, float64):
    sentences = generated_treebank(10)
    task = parser("--features", features, "--hidden", "8", sentences=sentences)
    task.actions = Replayed(len(task.labels))
    found = {}
    for way in ("agenda", "depth", "off", "one by one"):
        fresh()
        task.one_by_one = way == "one by one"
        with dy.autobatch(way if way in ("depth", "off") else "agenda"):
            losses = task.each(task.loss, sentences)
            dy.esum(losses).backward()
            found[way] = [loss.value() for loss in losses], gradients(task)
            assert way == "one by one" or len(dy.plan("map").rounds) <= 2 * max(map(len, sentences)) + 1
    assert len(task.actions.decisions) == sum(2 * len(s) for s in sentences)
    values, grads = found.pop("agenda")
    assert len({round(v, 6) for v in values}) == len(values)
    for other, other_grads in found.values():
        np.testing.assert_allclose(other, values, rtol=1e-10)
        for a, b in zip(grads, other_grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("features", sorted(FEATURES))
def test_gradients_are_those_of_differences(features, float64):
    sentences = generated_treebank(3)
    task = parser("--features", features, "--hidden", "4", "--word-dropout", "0", sentences=sentences)
    task.actions = Replayed(len(task.labels))

    def loss():
        fresh()
        return task.batch_loss(sentences)

    loss().backward()
    parameters = task.collection.parameters_list()
    found = [p.grad_as_array() for p in parameters]
    chance = np.random.default_rng(1)
    for p, gradient in zip(parameters, found, strict=True):
        values, direction = p.as_array(), chance.normal(size=p.shape)
        ends = []
        for step in (1e-5, -1e-5):
            p.set_value(values + step * direction)
            ends.append(loss().value())
        p.set_value(values)
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx((gradient * direction).sum(), rel=1e-4, abs=1e-6), p.name


@pytest.mark.parametrize("features", sorted(FEATURES))
def test_a_beam_of_one_is_greedy_and_a_wide_one_finds_the_best(features, float64):
    sentences = generated_treebank(6)
    task = parser("--features", features, "--hidden", "8", sentences=sentences)
    greedy = dy.map(task.greedy, sentences)
    one = dy.map(lambda s: task.beam_search(s, 1), sentences)
    assert [c.tree() for c in greedy] == [c.tree() for c in one]

    short = Sentence(sentences[0].forms[:2], sentences[0].tags[:2], [0, 1], ["x", "x"])
    best, tried = None, 0
    pending = [(0.0, Configuration(2), task.features.begin(task.inputs(short)))]
    while pending:  # all derivations
        score, c, memory = pending.pop()
        if c.is_final:
            tried += 1
            best = max(best or (score, c.tree()), (score, c.tree()))
            continue
        actions = task.actions.numbers[c.legal()]
        scores = task.features.scores(memory, c).npvalue()[actions]
        for action, p in zip(actions.tolist(), np.exp(scores) / np.exp(scores).sum()):
            transition, label = task.actions.table[action]
            after = task.features.after(memory, transition, action)
            pending.append((score + np.log(p), c.take(transition, label), after))
    assert tried == 2 * len(task.labels) ** 2
    assert task.beam_search(short, tried).tree() == best[1]


def test_one_value_is_read_a_transition():
    sentences = generated_treebank(8)
    for features in FEATURES:
        task = parser("--features", features, "--hidden", "8", sentences=sentences)
        fresh()
        task.predict(sentences)
        rounds = [r.instances for r in dy.plan("map").rounds]
        steps = max(len(s) for s in sentences) * 2
        assert len(rounds) == steps + (features == "bilstm")  # which computes all its parts before
        assert sum(rounds) == sum(2 * len(s) for s in sentences) + len(sentences) * (features == "bilstm")


def test_attachment_counts_every_word():
    gold = [Sentence("ab.", "XXX", [0, 1, 1], ["root", "obj", "punct"]), Sentence("c", "X", [0], ["root"])]
    parsed = [gold[0].with_tree([0, 1, 2], ["root", "nsubj", "punct"]), gold[1]]
    assert attachment(gold, parsed) == {"uas": 3 / 4, "las": 2 / 4}
    assert attachment(gold, gold) == {"uas": 1, "las": 1}


def test_trees_that_are_not_projective_are_reported_and_skipped(tmp_path):
    assert not is_projective(NOT_PROJECTIVE.heads)
    sentences = generated_treebank(12)
    write(tmp_path / "dev.conllu", [*sentences, NOT_PROJECTIVE])
    write(tmp_path / "test.conllu", [*sentences, NOT_PROJECTIVE])
    flags = ["--data", tmp_path, "--hidden", 8, "--epochs", 1]
    done = command(*flags)
    assert "1 of 13 training sentences are left out: their trees are not projective" in done.stdout
    assert "12 sentences to train on, 13 for dev" in done.stdout
    write(tmp_path / "dev.conllu", [NOT_PROJECTIVE])
    assert f"{tmp_path / 'dev.conllu'}, line 1: no tree" in command(*flags, status=1).stderr.splitlines()[-1]


def test_train_and_dev_files_come_first(tmp_path):
    write(tmp_path / "train.conllu", generated_treebank(7))
    write(tmp_path / "dev.conllu", generated_treebank(5))
    done = command("--data", tmp_path, "--hidden", 8, "--epochs", 1)
    assert "7 sentences to train on, 5 for dev" in done.stdout


def test_faults_in_files_are_one_clear_line(tmp_path):
    write(tmp_path / "test.conllu", generated_treebank(2))
    heads = [2, 1]
    write(tmp_path / "dev.conllu", [Sentence("a", "X", [0], ["root"]), Sentence("ab", "XX", heads, ["x", "y"])])
    done = command("--data", tmp_path, status=1)
    assert done.stderr.splitlines()[-1].endswith(
        f"{tmp_path / 'dev.conllu'}, line 3: expected one word with head 0, not 0"
    )
    assert "no-such-folder" in command("--data", "no-such-folder", status=1).stderr.splitlines()[-1]


def test_a_saved_model_needs_the_labels_of_new_training_data(trained, tmp_path):
    folder, _, _ = trained
    write(tmp_path / "dev.conllu", [Sentence("a", "X", [0], ["novel"])])
    write(tmp_path / "test.conllu", generated_treebank(2))
    done = command("--load", folder / "model", "--data", tmp_path, "--epochs", 1, status=1)
    assert "dev.conllu, line 1: the model was saved without the label novel" in done.stderr.splitlines()[-1]


def test_compare_has_a_row_without_map(trained, tmp_path):
    folder, _, _ = trained
    done = command("--load", folder / "model", "--limit", 32, "--compare", "--json", tmp_path / "compared.json")
    rows = json.loads((tmp_path / "compared.json").read_text())["compare"]
    assert list(rows) == ["off", "depth", "agenda", "one by one"]
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["agenda"]["loss"], rel=1e-3) and row["sentences_per_s"] > 0
    assert rows["one by one"]["batches"] is None
    assert any(line.startswith("one by one") for line in done.stdout.splitlines())


def test_resuming_goes_on_as_if_it_had_not_stopped(tmp_path):
    flags = ["--hidden", 8, "--limit", 48, "--threads", 1, "--batch-size", 16]
    command(*flags, "--epochs", 2, "--json", tmp_path / "straight.json")
    command(*flags, "--epochs", 1, "--save", tmp_path / "half")
    command("--load", tmp_path / "half", "--threads", 1, "--epochs", 1, "--json", tmp_path / "resumed.json")
    reports = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("straight", "resumed")]
    assert reports[0]["train_loss"] == reports[1]["train_loss"]
    assert reports[0]["las_per_epoch"] == reports[1]["las_per_epoch"]


@pytest.mark.skipif(importlib.util.find_spec("dynet") is None, reason="DyNet is not installed")
def test_dynet_goes_through_the_same_derivations():
    instances, sizes = bench_parser.load(None)
    jobs = [Job("parser", system, "agenda", 8, 5, "infer", instances[:15], sizes) for system in ("dynet", "dynbatch")]
    worker = measure.Worker("dynet", 1)  # in a process of its own: its import changes how floats are rounded
    worker.send(jobs[0])
    worker.receive()
    losses, _ = worker.ask("compare")
    worker.close()
    np.testing.assert_allclose(losses, Session(jobs[1]).compare()[0], rtol=1e-5)
