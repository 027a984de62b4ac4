"""What the tree models share: trees as pairs of numbers.

An instance is (tree, label). The tree is a word's number, or a pair of trees: whatever else a reader of trees keeps is
gone before anything is timed. All programs walk these pairs themselves, at every minibatch anew.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

UNIT = "trees"
GENERATED = 2000  # trees, without --data


def load(folder: str | None) -> tuple[list, dict[str, int]]:
    """The trees of ``folder``/train.txt in PTB brackets, or ListOps trees. Sizes: ``words`` and ``classes``."""
    from models.node_classifier import NodeClassifier
    from models.trees import listops

    trees = listops(GENERATED) if folder is None else NodeClassifier.read(Path(folder) / "train.txt", Namespace())
    numbers: dict[str, int] = {}
    instances = []
    for tree in trees:
        waiting: list[Any] = []  # finished subtrees, as in a shift-reduce parser
        for node in tree.nodes:
            if node.word is not None:
                waiting.append(numbers.setdefault(node.word, len(numbers) + 1))  # 0 is the models' unknown word
            else:
                right = waiting.pop()
                waiting.append((waiting.pop(), right))
        instances.append((waiting[0], tree.label))
    return instances, {"words": len(numbers) + 1, "classes": 1 + max(label for _, label in instances)}


def leaf_count(tree: Any) -> int:
    """How many leaves a tree has; one more than inner nodes."""
    leaves, pending = 0, [tree]
    while pending:
        part = pending.pop()
        if type(part) is int:
            leaves += 1
        else:
            pending += part
    return leaves


def by_levels(batch: list) -> tuple[Any, list[int], list[Any], Any]:
    """The structure of a minibatch for PyTorch, one level at a time.

    A level holds all nodes at one distance from the roots. The children of its inner nodes are then the whole of the
    next level, pair by pair, so that what a pair has lies side by side.

    Returns the words of all leaves, level by level; how many there are in each level; for each level, the places of its
    inner nodes and those of its leaves, or None where it has no more than one kind; and the labels.
    """
    import torch

    words, leaves, places = [], [], []
    level = [tree for tree, _ in batch]
    while level:
        inner = [k for k, tree in enumerate(level) if type(tree) is tuple]
        found = [tree for tree in level if type(tree) is int]
        words += found
        leaves.append(len(found))
        if inner and found:
            outer = [k for k, tree in enumerate(level) if type(tree) is int]
            places.append((torch.tensor(inner), torch.tensor(outer)))
        else:
            places.append(None)
        level = [child for k in inner for child in level[k]]
    return torch.tensor(words), leaves, places, torch.tensor([label for _, label in batch])


def merged(inner: Any, leaf: Any, place: Any) -> Any:
    """What the nodes of a level have, in their order, from what its inner nodes and its leaves have."""
    if place is None:
        return inner
    import torch

    rows = torch.empty(len(inner) + len(leaf), *inner.shape[1:])
    return rows.index_copy_(0, place[0], inner).index_copy_(0, place[1], leaf)
