"""Trees for the tree models: reading them from PTB brackets, binarizing them, and generating ListOps trees.

A file holds one tree after another, one or several lines each::

    (3 (2 It) (4 (2 is) (4 lovely)))
    (7 MAX (2 2) (7 SM (9 9) (8 8)))

The first word in a bracket is the node's label, an integer from 0 on. A bracket with a label and one word is a leaf.
Beside other children a bare word (``MAX`` above) is a leaf without a label, and a bracket that starts with a bracket
is an inner node without one. A "(" in the first column starts a new tree, so that the lines after the first of a tree
must be indented; this is what lets a missing ")" be found on its own line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from dynbatch.errors import FileFormatError
from models.text import lines


class Tree:
    """A labelled, ordered tree with words at its leaves.

    Attributes:
        label: the node's class, or None where it has none.
        word: a leaf's word; None in an inner node.
        children: the subtrees, left to right; empty in a leaf.
    """

    __slots__ = ("_nodes", "children", "label", "word")

    def __init__(self, label: int | None, word: str | None = None, children: Iterable[Tree] = ()) -> None:
        self.label = label
        self.word = word
        self.children = tuple(children)
        self._nodes: list[Tree] | None = None
        if (word is None) == (not self.children):
            raise ValueError("a tree is either a word or has children")

    @property
    def nodes(self) -> list[Tree]:
        """All nodes in post-order: children left to right, each before its parent, the root last.

        Found without recursion, so that no depth is too deep, and kept: a model asks for it at every visit of the tree.
        """
        if self._nodes is None:
            found, pending = [], [self]
            while pending:  # parent, then its children from the right: post-order backwards
                node = pending.pop()
                found.append(node)
                pending.extend(node.children)
            self._nodes = found[::-1]
        return self._nodes

    def __str__(self) -> str:
        """The tree in PTB brackets, on one line.

        `read_trees` reads it back, unless a node without a label begins with a leaf without one.
        """
        texts: list[str] = []  # of the finished subtrees that wait for their parent, as in a shift-reduce parser
        for node in self.nodes:
            label = "" if node.label is None else f"{node.label} "
            if node.word is not None:
                texts.append(f"({label}{node.word})" if label else node.word)
            else:
                count = len(node.children)
                texts[-count:] = [f"({label}{' '.join(texts[-count:])})"]
        return texts[0]

    def __repr__(self) -> str:
        return f"<Tree {self}>"


def read_trees(path: str | Path, labels: bool = True) -> list[Tree]:
    """Reads a file of trees in PTB brackets (the format is at the top of this module).

    Arguments:
        path: the file, in UTF-8.
        labels: False drops the labels, so that they can be any word, such as a parser's ``NP``.

    Raises:
        FileFormatError: the file holds no tree or is not well-formed; the message names file, line and column.
    """
    trees: list[Tree] = []
    open_brackets: list[_Bracket] = []

    def fail(line: int, column: int, message: str) -> FileFormatError:
        return FileFormatError(f"{path}, line {line}, column {column}: {message}")

    for line, column, token in _tokens(path):
        if token == "(":
            if column == 1 and open_brackets:
                break  # a new tree starts although the last one is not complete
            open_brackets.append(_Bracket(line, column))
        elif not open_brackets:
            raise fail(line, column, f"{token!r} outside all brackets")
        elif token != ")":
            open_brackets[-1].contents.append(token)
        else:
            bracket = open_brackets.pop()
            try:
                tree = bracket.tree(labels)
            except ValueError as error:
                raise fail(bracket.line, bracket.column, str(error)) from None
            (open_brackets[-1].contents if open_brackets else trees).append(tree)
    if open_brackets:
        raise fail(open_brackets[-1].line, open_brackets[-1].column, "this '(' is never closed")
    if not trees:
        raise fail(1, 1, "no tree in this file; expected PTB brackets such as (3 (2 It) (4 works))")
    return trees


class _Bracket:
    """What has been read of a node whose ")" is still to come: words and finished subtrees."""

    __slots__ = ("column", "contents", "line")

    def __init__(self, line: int, column: int) -> None:
        self.line = line
        self.column = column
        self.contents: list[str | Tree] = []

    def tree(self, labels: bool) -> Tree:
        """The finished node; a ValueError says what is wrong with it."""
        if not self.contents:
            raise ValueError("an empty bracket; expected a label and a word or subtrees")
        first, *rest = self.contents
        if isinstance(first, Tree):  # no label
            label, rest = None, self.contents
        elif labels and not re.fullmatch("[0-9]+", first):
            raise ValueError(f"the label {first!r} is not an integer from 0 on")
        elif not rest:
            raise ValueError(f"the node has a label, {first}, but neither a word nor subtrees")
        else:
            label = int(first) if labels else None
        if len(rest) == 1 and isinstance(rest[0], str):
            return Tree(label, word=rest[0])
        return Tree(label, children=[Tree(None, word=part) if isinstance(part, str) else part for part in rest])


_TOKEN = re.compile(r"[()]|[^()\s]+", re.ASCII)  # ASCII: as in `models.text.WORD`


def _tokens(path: str | Path) -> Iterator[tuple[int, int, str]]:
    """Line, column (both from 1) and text of every bracket and word of a file."""
    for line, text in lines(path):
        for match in _TOKEN.finditer(text):
            yield line, match.start() + 1, match.group()


def binarized(tree: Tree) -> Tree:
    """The same tree with two children at every inner node, for models that compose pairs.

    More than two children branch to the left, through nodes without labels; an only child takes its parent's place,
    and its parent's label where that has one.
    """
    if all(len(node.children) in (0, 2) for node in tree.nodes):
        return tree
    finished: list[Tree] = []
    for node in tree.nodes:
        count = len(node.children)
        if count:
            *first, last = finished[-count:]
            del finished[-count:]
            if not first:
                label = last.label if node.label is None else node.label
                finished.append(Tree(label, last.word, last.children))
            else:
                left = first[0]
                for child in first[1:]:
                    left = Tree(None, children=(left, child))
                finished.append(Tree(node.label, children=(left, last)))
        else:
            finished.append(node)
    return finished[0]


OPERATORS: dict[str, Callable[[int, int], int]] = {"MAX": max, "MIN": min, "SM": lambda a, b: (a + b) % 10}
"""The ListOps operators used here: those that are defined by what they make of two values (SM is the sum modulo 10)."""


def listops(count: int, seed: int = 0, depth: int = 4, binary: bool = True) -> list[Tree]:
    """Random ListOps expressions (Nangia and Bowman 2018) whose every label can be computed exactly.

    A node holds an operator and two to four operands, each a digit or another such node; its label is its value,
    0 to 9. The operator itself is a leaf without a label. No expression comes twice.

    Arguments:
        count: how many.
        seed: equal seeds give equal trees, and a larger count continues the same list.
        depth: how many operators can be nested, at least 2 (so that there are enough different expressions).
        binary: reads operands one by one from the left, ``(9 (2 MAX (2 2)) (9 9))``, each node labelled with the
            value so far; False gives nodes of three to five children, ``(9 MAX (2 2) (9 9))``.
    """
    random = np.random.default_rng(seed)
    if depth < 2:
        raise ValueError(f"depth must be at least 2, not {depth}")

    def expression(levels: int) -> Tree:
        name = list(OPERATORS)[random.integers(len(OPERATORS))]
        operands = [
            expression(levels - 1) if levels > 1 and random.random() < 0.35 else _digit(int(random.integers(10)))
            for _ in range(random.integers(2, 5))
        ]
        children, value = [Tree(None, word=name)], None
        for operand in operands:
            value = operand.label if value is None else OPERATORS[name](value, operand.label)
            children.append(operand)
            if binary:
                children = [Tree(value, children=children)]
        return children[0] if binary else Tree(value, children=children)

    found: dict[str, Tree] = {}
    while len(found) < count:
        tree = expression(depth)
        found.setdefault(str(tree), tree)
    return list(found.values())


def _digit(value: int) -> Tree:
    return Tree(value, word=str(value))
