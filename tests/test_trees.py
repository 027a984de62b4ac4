"""Reading trees from PTB brackets, binarizing them, and the ListOps generator."""

from __future__ import annotations

import pytest

from dynbatch.errors import FileFormatError
from models.trees import Tree, binarized, listops, read_trees


def written(tmp_path, text):
    path = tmp_path / "trees.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(tmp_path, text):
    return read_trees(written(tmp_path, text))


def test_reads_labels_words_and_order(tmp_path):
    (tree,) = read(tmp_path, "(3 (2 It) (4 (2 is) (0 lovely)))\n")
    assert [(node.label, node.word) for node in tree.nodes] == [
        (2, "It"),
        (2, "is"),
        (0, "lovely"),
        (4, None),
        (3, None),
    ]
    assert tree.nodes[-1] is tree
    assert [child.label for child in tree.children] == [2, 4]
    assert str(tree) == "(3 (2 It) (4 (2 is) (0 lovely)))"


def test_reads_several_lines_a_tree_blank_lines_and_windows_line_ends(tmp_path):
    text = "\ufeff(3 (2 It)\r\n   (4 (2 is) (0 lovely)))\r\n\r\n(1 (0 a) (1 b)) (2 c)\r\n"
    assert [str(tree) for tree in read(tmp_path, text)] == [
        "(3 (2 It) (4 (2 is) (0 lovely)))",
        "(1 (0 a) (1 b))",
        "(2 c)",
    ]


def test_nodes_without_labels(tmp_path):
    (tree,) = read(tmp_path, "((7 MAX (2 2) (7 7)) (1 1))")
    assert tree.label is None
    operator = tree.children[0].children[0]
    assert (operator.label, operator.word) == (None, "MAX")
    assert str(tree) == "((7 MAX (2 2) (7 7)) (1 1))"


def test_labels_can_be_dropped(tmp_path):
    path = written(tmp_path, "( (S (NP (DT the) (NN cat)) (VP sits)))")
    (tree,) = read_trees(path, labels=False)
    assert [node.word for node in tree.nodes if node.word] == ["the", "cat", "sits"]
    assert {node.label for node in tree.nodes} == {None}
    assert [len(node.children) for node in binarized(tree).nodes] == [0, 0, 2, 0, 2]


def test_a_word_may_hold_a_non_breaking_space(tmp_path):
    (tree,) = read(tmp_path, "(2 8\xa01\\/2)")
    assert tree.word == "8\xa01\\/2"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("(2 (1 a) (3 b))\n(2 (1 a) (3 b)\n", 2, 1, "this '(' is never closed"),
        ("(2 (1 a) (3 b)\n(2 (1 a) (3 b))\n", 1, 1, "this '(' is never closed"),
        ("(2 (1 a) (3 b\n", 1, 10, "this '(' is never closed"),
        ("(2 a)\n(2 (1 a) (3 b)))\n", 2, 16, "')' outside all brackets"),
        (")\n", 1, 1, "')' outside all brackets"),
        ("(2 a)\n stray (2 b)\n", 2, 2, "'stray' outside all brackets"),
        ("(2 a)\n(2 () (1 b))\n", 2, 4, "an empty bracket"),
        ("(2 (1 a) (NP b))\n", 1, 10, "the label 'NP' is not an integer"),
        ("(-1 a)\n", 1, 1, "the label '-1' is not an integer"),
        ("(2 (1 a)\n   (3))\n", 2, 4, "has a label, 3, but neither a word nor subtrees"),
        ("", 1, 1, "no tree in this file"),
        ("\n  \n", 1, 1, "no tree in this file"),
        (b"(2 a)\n(2 \xff)\n", 2, 4, "not UTF-8"),
    ],
)
def test_malformed_files_are_refused_with_the_place(tmp_path, text, line, column, message):
    path = written(tmp_path, text)
    with pytest.raises(FileFormatError) as caught:
        read_trees(path)
    assert str(caught.value).startswith(f"{path}, line {line}, column {column}: ")
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        read_trees(tmp_path / "nowhere.txt")


def test_no_depth_is_too_deep(tmp_path):
    depth = 20_000
    text = "(1 (0 a) " * depth + "(0 b)" + ")" * depth
    (tree,) = read(tmp_path, text)
    assert len(tree.nodes) == 2 * depth + 1
    assert str(tree) == text
    assert binarized(tree) is tree


def test_a_tree_has_a_word_or_children():
    with pytest.raises(ValueError, match="either a word or"):
        Tree(1)
    with pytest.raises(ValueError, match="either a word or"):
        Tree(1, "word", [Tree(1, "child")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1 (0 a) (1 b))", "(1 (0 a) (1 b))"),
        ("(1 (0 a) (1 b) (2 c) (3 d))", "(1 (((0 a) (1 b)) (2 c)) (3 d))"),
        ("(1 (2 a))", "(1 a)"),
        ("(1 (2 (0 a) (3 (4 (1 b)))))", "(1 (0 a) (3 b))"),
        ("((2 (0 a) (3 b)))", "(2 (0 a) (3 b))"),
    ],
)
def test_binarized(tmp_path, text, expected):
    (tree,) = read(tmp_path, text)
    assert str(binarized(tree)) == expected
    assert str(tree) == text  # untouched


def value_of(tree):
    """The value of an n-ary ListOps tree, from its words alone."""
    if tree.word is not None:
        return int(tree.word)
    operator, *operands = tree.children
    values = [value_of(operand) for operand in operands]
    return {"MAX": max, "MIN": min, "SM": lambda vs: sum(vs) % 10}[operator.word](values)


def test_listops_labels_are_the_values():
    for tree in listops(300, seed=5, binary=False):
        for node in tree.nodes:
            if node.word in ("MAX", "MIN", "SM"):
                assert node.label is None
            else:
                assert node.label == value_of(node)


def test_listops_binary_trees_read_the_same_expressions_from_the_left():
    def flattened(tree):
        if tree.word is not None:
            return tree
        left, right = tree.children
        parts = (*flattened(left).children, flattened(right)) if left.label is not None else (left, flattened(right))
        return Tree(tree.label, children=parts)

    for pairs, whole in zip(listops(200, seed=3), listops(200, seed=3, binary=False)):
        assert {len(node.children) for node in pairs.nodes} == {0, 2}
        assert str(flattened(pairs)) == str(whole)


def test_listops_is_seeded_without_repeats_and_extends(tmp_path):
    first = [str(tree) for tree in listops(400, seed=1)]
    assert first == [str(tree) for tree in listops(400, seed=1)]
    assert first[:100] == [str(tree) for tree in listops(100, seed=1)]
    assert first != [str(tree) for tree in listops(400, seed=2)]
    assert len(set(first)) == 400
    assert [str(tree) for tree in read(tmp_path, "\n".join(first))] == first


def test_listops_values_are_spread():
    labels = [tree.label for tree in listops(2000)]
    assert all(labels.count(value) > 100 for value in range(10))
    assert max(labels.count(value) for value in range(10)) < 400  # guessing one value is right less than every 5th time
