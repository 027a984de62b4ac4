"""The arc-hybrid system: its derivations, and its oracle against all that can be tried."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from models.arc_hybrid import LEFT, RIGHT, SHIFT, Configuration, Oracle, is_projective
from models.treebank import generated_treebank


def is_tree(heads):
    """Whether these are the heads of a tree with one word under the root."""
    for word in range(1, len(heads) + 1):
        for _ in heads:
            word = heads[word - 1] if word else 0
        if word:
            return False
    return heads.count(0) == 1


def crossing(heads):
    """Whether two arcs cross, the root behind the last word."""
    arcs = [sorted((word, head or len(heads) + 1)) for word, head in enumerate(heads, start=1)]
    return any(a < c < b < d for (a, b), (c, d) in itertools.permutations(arcs, 2))


def trees(words):
    """All trees over so many words, or a sample where they are many."""
    if words <= 4:
        return [heads for heads in itertools.product(range(words + 1), repeat=words) if is_tree(heads)]
    chance = random.Random(words)
    found = []
    while len(found) < 60:
        heads = tuple(chance.randrange(words + 1) for _ in range(words))
        if is_tree(heads) and (not crossing(heads) or len(found) < 10):
            found.append(heads)
    return found


def configurations(words):
    """All that can be come to."""
    found, pending = {}, [Configuration(words)]
    while pending:
        c = pending.pop()
        if (c.stack, c.front) not in found:
            found[c.stack, c.front] = c
            pending += [c.take(transition) for transition in c.legal() if not c.is_final]
    return list(found.values())


def most_arcs(heads):
    """A function that tries all derivations from a configuration on: how many more arcs of the tree can be had."""

    def through(c, transition):
        right = transition != SHIFT and heads[c.stack[-1] - 1] == c.head_by(transition)
        following = c.take(transition)
        return right + most(following.stack, following.front)

    @functools.cache
    def most(stack, front):
        c = Configuration(len(heads), stack, front)
        return 0 if c.is_final else max(through(c, transition) for transition in c.legal())

    return most, through


@pytest.mark.parametrize("words", range(1, 7))
def test_costs_are_those_found_by_trying_everything(words):
    for heads in trees(words):
        most, through = most_arcs(heads)
        assert (most((), 1) == words) == is_projective(heads) == (not crossing(heads))
        if not is_projective(heads):
            continue
        oracle = Oracle(heads)
        for c in configurations(words):
            if not c.is_final:
                before = most(c.stack, c.front)
                expected = {transition: before - through(c, transition) for transition in c.legal()}
                assert oracle.costs(c) == expected, (heads, c.stack, c.front)
                assert min(expected.values()) == 0


def test_a_derivation_without_cost_gives_the_tree():
    chance = random.Random(1)
    for heads in [s.heads for s in generated_treebank(100)] + [h for n in range(1, 7) for h in trees(n)]:
        if crossing(heads):
            continue
        oracle, c, taken = Oracle(heads), Configuration(len(heads)), 0
        while not c.is_final:
            c = c.take(chance.choice([t for t, cost in oracle.costs(c).items() if not cost]), label=taken)
            taken += 1
        assert tuple(c.tree()[0]) == tuple(heads) and taken == 2 * len(heads)
        assert len(set(c.tree()[1])) == len(heads)  # each arc kept the label that it was made with


def test_every_derivation_ends_in_a_projective_tree():
    chance = random.Random(2)
    for words in [1, 2, 3, 10, 30] * 5:
        c = Configuration(words)
        while not c.is_final:
            c = c.take(chance.choice(c.legal()))
        heads = tuple(c.tree()[0])
        assert is_tree(heads) and not crossing(heads)


def test_transitions():
    c = Configuration(2)
    assert c.legal() == (SHIFT,)
    c = c.take(SHIFT)
    assert c.legal() == (SHIFT, LEFT) and c.head_by(LEFT) == 2
    both = c.take(SHIFT)
    assert both.legal() == (RIGHT,)  # not both under the root
    assert both.take(RIGHT, 5).take(LEFT, 6).tree() == ([0, 1], [6, 5])
    assert c.take(LEFT, 7).take(SHIFT).take(LEFT, 8).tree() == ([2, 0], [7, 8])
    assert (c.stack, c.front, c.arcs) == ((1,), 2, None)  # configurations do not change
