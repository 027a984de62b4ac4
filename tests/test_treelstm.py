"""The TreeLSTM and, through it, the command line that all models share."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import dynbatch as dy
from models import plot
from models.treelstm import TreeClassifier
from models.trees import Tree, listops
from tests import model_runs
from tests.model_runs import gradients, new_task

command = functools.partial(model_runs.command, "treelstm")
classifier = functools.partial(new_task, TreeClassifier)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained for three epochs on generated trees, its report and its output."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--hidden", 32, "--epochs", 3, "--limit", 2000, "--learning-rate", 0.1, "--batch-size", 32]
    done = command(*flags, "--save", folder / "model", "--json", folder / "report.json")
    return folder, json.loads((folder / "report.json").read_text()), done


def test_learns_listops_far_above_chance(trained):
    _, report, _ = trained
    assert report["dev_accuracy"] > 0.5  # the commonest value is right less than every 5th time


def test_report_and_output(trained):
    _, report, done = trained
    assert report["dev_accuracy"] == max(report["dev_accuracy_per_epoch"])
    assert len(report["dev_accuracy_per_epoch"]) == 3
    assert report["train_loss"] > 0 and report["trees_per_s"] > 0 and report["seconds"] > 0
    assert report["strategy"] == "agenda"
    assert 1 < report["batches"] < report["nodes"] / 10
    assert "trees/s" in done.stderr and "loss=" in done.stderr  # the progress bar
    for text in (f"dev accuracy {report['dev_accuracy']:.4f}", "trees/s", "batches a minibatch"):
        assert text in done.stdout.splitlines()[-1]


def test_evaluate_a_saved_model_without_its_flags(trained):
    folder, report, _ = trained
    command("--load", folder / "model", "--evaluate", "--json", folder / "evaluated.json")
    evaluated = json.loads((folder / "evaluated.json").read_text())
    assert evaluated["dev_accuracy"] == report["dev_accuracy_per_epoch"][-1]
    assert evaluated["trees_per_s"] > 0


def test_predict_prints_a_label_per_tree_and_nothing_else(trained, tmp_path):
    folder, _, _ = trained
    trees = listops(40, seed=9)
    path = tmp_path / "unlabelled.txt"
    unseen = "(S (NP never) (VP (VB seen) before))"
    path.write_text("\n".join([*map(str, trees), unseen]) + "\n")
    done = command("--load", folder / "model", "--predict", path)
    labels = [int(line) for line in done.stdout.splitlines()]
    assert len(labels) == 41
    assert sum(tree.label == label for tree, label in zip(trees, labels)) > 15


def test_resuming_is_bit_equal(tmp_path):
    """Two epochs in one run, against one, a saved file, and another; with dropout, so that random draws count."""
    flags = ["--hidden", 16, "--limit", 200, "--batch-size", 16, "--dropout", 0.3, "--threads", 1, "--seed", 4]
    command(*flags, "--epochs", 2, "--save", tmp_path / "straight", "--json", tmp_path / "straight.json")
    command(*flags, "--epochs", 1, "--save", tmp_path / "half")
    done = command("--load", tmp_path / "half", "--threads", 1, "--epochs", 1, "--save", tmp_path / "resumed")
    assert "epoch 2:" in done.stdout and "epoch 1:" not in done.stdout
    straight, resumed = load_file(tmp_path / "straight"), load_file(tmp_path / "resumed")
    assert straight.keys() == resumed.keys()
    for name, array in straight.items():  # parameters and optimizer state
        assert array.tobytes() == resumed[name].tobytes(), name
    states = [dy.load_metadata(tmp_path / name) for name in ("straight", "resumed")]
    assert states[0] == states[1]


@pytest.mark.parametrize("cell", ["binary", "childsum"])
def test_strategies_agree(cell):
    trees = listops(20, seed=2, binary=cell == "binary")
    task = classifier("--cell", cell, "--hidden", "12", instances=trees)
    found = {}
    for strategy in ("off", "depth", "agenda"):
        with dy.autobatch(strategy):
            dy.renew_cg()
            loss = task.batch_loss(trees)
            value = loss.value()
            plan = dy.plan()
            loss.backward()
        found[strategy] = value, gradients(task), plan.batches
        task.collection.reset_gradient()
    for value, grads, batches in (found["depth"], found["agenda"]):
        assert value == pytest.approx(found["off"][0], rel=1e-5)
        assert batches < found["off"][2] / 5
        for grad, expected in zip(grads, found["off"][1]):
            np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_a_minibatch_equals_its_trees_one_by_one():
    trees = listops(8, seed=3)
    task = classifier("--hidden", "12", instances=trees)
    dy.renew_cg()
    together = task.batch_loss(trees).value()
    apart = 0.0
    for tree in trees:
        dy.renew_cg()
        apart += task.loss(tree).value()
    assert together == pytest.approx(apart, rel=1e-5)


def test_child_sum_ignores_the_order_of_children_and_binary_does_not():
    a, b, c = (Tree(k, word=str(k)) for k in range(3))
    orders = [Tree(1, children=order) for order in ((a, b, c), (c, a, b))]
    task = classifier("--cell", "childsum", "--hidden", "8", instances=orders)
    dy.renew_cg()
    first, second = (task.encode(tree)[-1].npvalue() for tree in orders)
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)

    pairs = [Tree(1, children=order) for order in ((a, b), (b, a))]
    task = classifier("--hidden", "8", instances=pairs)
    dy.renew_cg()
    first, second = (task.encode(tree)[-1].npvalue() for tree in pairs)
    assert np.abs(first - second).max() > 1e-3


def test_the_binary_cell_computes_the_papers_equations():
    def logistic(x):
        return 1 / (1 + np.exp(-x))

    tree = Tree(1, children=[Tree(0, word="a"), Tree(1, word="b")])
    task = classifier("--hidden", "6", instances=[tree])
    cell = task.encoder
    value = {name: p.as_array() for name, p in vars(cell).items() if isinstance(p, dy.Parameter)}
    states = []
    for word in ("a", "b"):
        x = cell.embeddings.row_as_array(task.word_ids[word])
        i, o, u = (value["W_" + gate] @ x + value["b_" + gate] for gate in "iou")
        c = logistic(i) * np.tanh(u)
        states.append((logistic(o) * np.tanh(c), c))
    (h_l, c_l), (h_r, c_r) = states
    i, o, u, f, g = (value["L_" + k] @ h_l + value["R_" + k] @ h_r + value["b_" + k] for k in "ioufg")
    c = logistic(i) * np.tanh(u) + logistic(f) * c_l + logistic(g) * c_r
    dy.renew_cg()
    np.testing.assert_allclose(task.encode(tree)[-1].npvalue(), logistic(o) * np.tanh(c), rtol=1e-4, atol=1e-6)


def test_a_tree_of_any_depth():
    tree = Tree(1, word="end")
    for _ in range(5000):
        tree = Tree(0, children=(Tree(None, word="x"), tree))
    task = classifier("--hidden", "4", instances=[tree])
    dy.renew_cg()
    loss = task.loss(tree)
    assert np.isfinite(loss.value())
    loss.backward()


def test_dropout_changes_the_loss_and_not_the_prediction():
    trees = listops(4)
    task = classifier("--hidden", "16", "--dropout", "0.5", instances=trees)

    def loss():
        dy.renew_cg()
        return task.batch_loss(trees).value()

    assert loss() != loss()
    task.dropout = 0.0
    assert loss() == loss()


def test_compare_covers_every_strategy_and_changes_nothing(trained):
    folder, _, _ = trained
    before = (folder / "model").read_bytes()
    done = command("--load", folder / "model", "--compare", "--json", folder / "compared.json")
    rows = json.loads((folder / "compared.json").read_text())["compare"]
    assert list(rows) == ["off", "depth", "agenda"]
    for strategy, row in rows.items():
        assert row["trees_per_s"] > 0
        assert row["loss"] == pytest.approx(rows["off"]["loss"], rel=1e-4)
        assert any(line.startswith(strategy) for line in done.stdout.splitlines())
    assert rows["agenda"]["batches"] < rows["off"]["batches"] / 10
    assert (folder / "model").read_bytes() == before


def test_demo_ends_with_the_comparison_and_the_plot(tmp_path):
    png = tmp_path / "plots" / "loss.png"
    done = command("--demo", "--epochs", 1, "--limit", 300, "--hidden", 16, "--plot", png)
    assert "against off" in done.stdout
    assert any("\u2801" <= character <= "\u28ff" for character in done.stdout)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_drawn_curve_falls_from_the_left_to_the_right():
    lines = plot.drawn([(k, 100.0 - k) for k in range(1, 100)], "trees", "loss", width=20, height=5).splitlines()
    assert lines[0] == "loss" and lines[-1].endswith("99 trees")
    rows = [line.split("┤")[1] for line in lines[1:6]]
    assert all(len(row) == 20 for row in rows)
    inked = [[k for k, character in enumerate(row) if character != "\u2800"] for row in rows]
    assert inked[0][0] == 0 and inked[-1][-1] == 19
    assert plot.drawn([(1, 2.0)], "trees", "loss")  # one point, and no range


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--predict", "trees.txt"], 2, "--predict needs a model"),
        (["--evaluate", "--epochs", "3"], 2, "does not train"),
        (["--autobatch", "magic"], 2, "off"),
        (["--device", "abacus"], 1, "cpu"),
        (["--hidden", "0"], 2, "not a positive number"),
        (["--save", "no/such/folder/model"], 2, "no folder"),
        (["--data", "no-such-folder"], 1, "no-such-folder"),
        (["--load", "README.md", "--evaluate"], 1, "README.md"),
    ],
)
def test_faults_in_flags_and_files_are_one_clear_line(flags, status, message):
    done = command(*flags, status=status)
    assert "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_a_broken_tree_file_is_named_with_line_and_column(tmp_path):
    (tmp_path / "train.txt").write_text("(1 (0 a) (1 b))\n(1 (0 a) (1 b)\n")
    (tmp_path / "dev.txt").write_text("(1 (0 a) (1 b))\n")
    done = command("--data", tmp_path, status=1)
    assert f"{tmp_path / 'train.txt'}, line 2, column 1" in done.stderr.splitlines()[-1]
    (tmp_path / "train.txt").write_text("((0 a) (1 b))\n")
    assert "the root of tree 1 has no label" in command("--data", tmp_path, status=1).stderr


def test_a_flag_that_does_not_fit_the_saved_model(trained):
    folder, _, _ = trained
    done = command("--load", folder / "model", "--hidden", 64, status=2)
    assert "has hidden 32" in done.stderr


def test_trees_from_a_folder(tmp_path):
    trees = listops(300, binary=False)
    (tmp_path / "train.txt").write_text("".join(f"{tree}\n" for tree in trees[:250]))
    (tmp_path / "dev.txt").write_text("".join(f"{tree}\n" for tree in trees[250:]))
    for cell in ("binary", "childsum"):
        report = tmp_path / f"{cell}.json"
        command("--data", tmp_path, "--cell", cell, "--hidden", 8, "--epochs", 1, "--json", report)
        assert 0 <= json.loads(report.read_text())["dev_accuracy"] <= 1
