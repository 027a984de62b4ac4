"""The shift-reduce parser: it learns to parse, and takes the same actions however it is run."""

from __future__ import annotations

import json
import operator

import pytest

import dynbatch as dy
from dynbatch.errors import FileFormatError
from models import training
from models.stackrnn import Sentence as S
from models.stackrnn import StackParser, actions_of, formulas, phrases, tree_of, words_of
from models.trees import read_trees
from tests.one_by_one import assert_equal, looped, made, outcome

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "^": operator.pow}


def sentences(count: int, seed: int = 0) -> list[S]:
    return [S(words_of(tree), tree) for tree in formulas(count, seed)]


def test_learns_which_operator_binds_stronger(tmp_path, capsys):
    report, model, text = (tmp_path / name for name in ("report.json", "model", "formulas.txt"))
    flags = f"--hidden 32 --epochs 3 --limit 600 --batch-size 32 --learning-rate 0.05 --json {report} --save {model}"
    assert training.main(StackParser, flags.split()) == 0
    found = json.loads(report.read_text())
    assert found["dev_f1"] > 0.9 and found["dev_exact"] > 0.7
    text.write_text("a + b * c\nd\n")
    capsys.readouterr()
    assert training.main(StackParser, ["--load", str(model), "--predict", str(text)]) == 0
    assert capsys.readouterr().out.splitlines() == ["(1 (0 a +) (2 (0 b *) c))", "d"]


@pytest.mark.usefixtures("float64")
def test_every_way_to_run_it_agrees():
    instances = sentences(10, seed=1)
    task = made(StackParser, "--hidden 8", instances)
    taken, expected = [], None

    def decided(way):
        """The losses of the actions that the parser takes, which are noted."""
        results = way(lambda sentence: task.parse(task.ids(sentence.words), task.best), instances)
        actions = [actions for actions, _ in results]
        taken.append(actions)
        return [loss for _, losses in results for loss in losses]

    for strategy in ("off", "depth", "agenda"):
        for way in (dy.map, looped):
            with dy.autobatch(strategy):
                found = outcome(task, lambda way=way: decided(way))
            expected = expected or found
            assert_equal(found, expected)
    assert all(actions == taken[0] for actions in taken)
    assert len({tuple(actions) for actions in taken[0]}) > 5 and any(0 in actions[3:-3] for actions in taken[0])

    def replayed():
        """The same decisions, recorded before."""
        for sentence, actions in zip(instances, taken[0]):
            yield from task.parse(task.ids(sentence.words), task.given(actions))[1]

    assert_equal(outcome(task, lambda: list(replayed())), expected)


def test_a_round_of_a_minibatch_is_one_action_of_every_sentence():
    instances = sentences(16)
    task = made(StackParser, "--hidden 8", instances)
    with dy.no_grad():
        task.predict(instances)
    plan = dy.plan("map")
    assert len(plan.rounds) < max(2 * len(words) for words, _ in instances)
    assert plan.nodes / plan.batches > 4


def test_any_sentence_gets_a_tree(tmp_path):
    task = made(StackParser, "--hidden 8", sentences(20))
    odd = [S(words, None) for words in (("unseen",), ("a", "b"), ("+", "+", "(", "a", ")"))]
    trees = [str(tree) for tree in task.write(odd, task.predict(odd))]
    assert trees[0] == "unseen" and trees[1].endswith("a b)")
    path = tmp_path / "empty.txt"
    path.write_text("a\n\n")
    with pytest.raises(FileFormatError, match=r"empty\.txt, line 2"):
        StackParser.read(path, training.parse(StackParser, []), labels=False)


def test_actions_build_the_tree_that_they_come_from(tmp_path):
    for words, tree in sentences(50):
        built = tree_of(words, actions_of(tree))
        assert actions_of(built) == actions_of(tree) and words_of(built) == words
        assert len(list(phrases(words, actions_of(tree)))) == len(words) - 1
    path = tmp_path / "train.txt"
    path.write_text("(3 (2 It) (4 (2 is) (4 lovely)))\n")
    (tree,) = read_trees(path)
    assert actions_of(tree) == [0, 0, 0, 5, 4]
    assert list(phrases(words_of(tree), actions_of(tree))) == [(1, 3, 5), (0, 3, 4)]


def test_formulas_are_what_they_mean():
    values = {chr(ord("a") + k): 1 + 0.1 * k for k in range(26)}
    compared = 0
    for tree in formulas(200, seed=5):
        try:
            plain = eval(" ".join(words_of(tree)).replace("^", "**"), {}, values)
        except (OverflowError, ZeroDivisionError):
            continue
        if isinstance(plain, float):
            assert plain == pytest.approx(_value(tree, values), rel=1e-6)
            compared += 1
    assert compared > 100


def _value(tree, values):
    """What the tree says that a formula's value is."""
    if tree.word is not None:
        return values[tree.word]
    partial, right = tree.children
    left, middle = partial.children
    if left.word == "(":
        return _value(middle, values)
    x, y = _value(left, values), _value(right, values)
    return OPERATORS[middle.word](x, y)
