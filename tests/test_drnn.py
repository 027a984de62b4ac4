"""The doubly-recurrent network: it learns to grow trees, and grows the same ones however it is run."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.drnn import DEEPEST, WIDEST, Decisions, Given, Node, TreeGrower, plants, read_instances, read_tree
from tests.one_by_one import assert_equal, looped, made, outcome


def test_learns_to_grow_the_trees_that_sentences_describe(tmp_path):
    report = tmp_path / "report.json"
    flags = f"--hidden 64 --epochs 12 --learning-rate 0.05 --batch-size 32 --json {report} --save {tmp_path / 'model'}"
    assert training.main(TreeGrower, flags.split()) == 0
    found = json.loads(report.read_text())
    assert found["dev_f1"] > 0.9 and found["dev_exact"] > 0.75


@pytest.mark.usefixtures("float64")
def test_every_way_to_run_it_agrees(monkeypatch):
    instances = plants(12, seed=3)
    task = made(TreeGrower, "--hidden 12", instances)
    trainer = task.trainer(0.1)
    for _ in range(30):  # so that trees differ
        training.train_step(task, trainer, instances)
    grown = {}

    def decided(way):
        """The losses of the trees that the model decides on, which are noted."""
        results = way(lambda instance: task.root(task.ids(instance.words), Decisions()), instances)
        trees = [tree for (tree,), _ in results]
        assert grown.setdefault("trees", trees) == trees
        return [loss for _, losses in results for loss in losses]

    expected = None
    for strategy in ("off", "depth", "agenda"):
        for way in (dy.map, looped):
            monkeypatch.setattr(Decisions, "each", staticmethod(way))
            with dy.autobatch(strategy):
                found = outcome(task, lambda way=way: decided(way))
            expected = expected or found
            assert_equal(found, expected)
    sizes = [len(list(tree.paths())) for tree in grown["trees"]]
    assert len(set(sizes)) > 3 and max(sizes) > 10

    def replayed():
        """The same decisions, recorded before."""
        for instance, tree in zip(instances, grown["trees"]):
            yield from task.root(task.ids(instance.words), Given([tree], task.label_ids))[1]

    assert_equal(outcome(task, lambda: list(replayed())), expected)


@pytest.mark.usefixtures("float64")  # with some weights, trees of a model that was not trained fill the memory
def test_the_trees_of_a_minibatch_grow_together():
    instances = plants(32)
    task = made(TreeGrower, "--hidden 8", instances)
    with dy.no_grad():
        trees = task.predict(instances)
    paths = [path for tree in trees for path in tree.paths()]  # labels, and places between them
    assert max(len(path) // 2 + 1 for path in paths) <= DEEPEST
    assert max(max((0, *path[1::2])) for path in paths) < WIDEST
    assert dy.plan("map").rounds[0].instances == 32


def test_the_node_computes_the_papers_equations():
    instances = plants(1)
    task = made(TreeGrower, "--hidden 6", instances)
    rng = np.random.default_rng(1)
    h_a, h_f = rng.standard_normal(6), rng.standard_normal(6)
    value = {name: p.as_array() for name, p in vars(task).items() if isinstance(p, dy.Parameter)}
    h = np.tanh(value["U_f"] @ h_f + value["U_a"] @ h_a)
    for a, f in ((-100, 100), (0, 0)):
        log_odds = value["u"] @ h
        has_children, has_sibling = log_odds + (a, f) >= 0
        scores = value["W"] @ h + has_children * value["v_a"] + has_sibling * value["v_f"]
        dy.renew_cg()
        found = task.node(dy.inputVector(h_a), dy.inputVector(h_f), a, f).npvalue()
        np.testing.assert_allclose(found, [*log_odds, *scores], rtol=1e-4, atol=1e-6)


def test_reads_and_writes_trees(tmp_path):
    tree = Node("a", (Node("b"), Node("c", (Node("d"),))))
    assert str(tree) == "(a b (c d))" and read_tree(str(tree)) == tree and read_tree("a") == Node("a")
    path = tmp_path / "train.txt"
    path.write_text("x y\t(a b (c d))\nz\ta\n")
    assert [instance.words for instance in read_instances(path)] == [("x", "y"), ("z",)]
    for wrong in ("x", "x\t", "x\t(a", "x\ta)", "x\t()", "x\t((a) b)", "x\ta b", "\ta"):
        path.write_text(f"x\ta\n{wrong}\n")
        with pytest.raises(FileFormatError, match=r"train\.txt, line 2"):
            read_instances(path)


def test_plants_follow_their_rule():
    instances = plants(1024)
    assert len({instance.words for instance in instances}) == 1024
    found = {" ".join(words): str(tree) for words, tree in instances}
    assert found["p1 high2 step2 twist1"] == "(p1 p3 p5 p7)"
    assert found["p1 high3 step2 twist1"] == "(p1 (p3 p5 p7) (p5 p7) (p7 p9 p11 p13))"
    assert found["p15 high3 step1 twist0"] == "(p15 p0)"
