"""Tagged sentences for the sequence models: reading them from ``word|tag`` files, and generating some.

A file holds one sentence a line, words between spaces, each with its tag behind a bar::

    the|O Japanese|I-MISC band|O

What follows the last bar is the tag, so that a word may hold bars. Empty lines are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dynbatch.errors import FileFormatError
from models.text import WORD, lines


class Sentence(NamedTuple):
    """Words, and for each a tag, None where it is not known."""

    words: tuple[str, ...]
    tags: tuple[str | None, ...]


def read_sentences(path: str | Path, tags: bool = True) -> list[Sentence]:
    """Reads a file of tagged sentences (the format is at the top of this module).

    Arguments:
        path: the file, in UTF-8.
        tags: False drops the tags, and takes words without any too.

    Raises:
        FileFormatError: a word has no tag, or the file holds no sentence; the message names file, line and column.
    """
    sentences = []
    for number, text in lines(path):
        pairs = []
        for match in WORD.finditer(text):
            word, _, tag = match.group().rpartition("|")
            if not tags:
                pairs.append((word or match.group(), None))
            elif word and tag:
                pairs.append((word, tag))
            else:
                place = f"{path}, line {number}, column {match.start() + 1}"
                raise FileFormatError(f"{place}: expected word|tag, not {match.group()!r}")
        if pairs:
            sentences.append(Sentence(*zip(*pairs)))
    if not sentences:
        raise FileFormatError(f"{path}: no sentence in this file; expected lines such as the|O band|O")
    return sentences


MARKERS = ("<", ">")
SHORTEST, LONGEST = 5, 30  # words of a generated sentence


def marked_sentences(count: int, seed: int = 0) -> list[Sentence]:
    """Random sentences whose tags depend on what comes before a word and on what comes after it.

    Every fifth word or so is a marker, "<" or ">"; the others mean nothing. A word's tag is the nearest marker before
    it and the nearest one after it, such as "<>", with "-" where there is none: nine tags.

    Arguments:
        count: how many.
        seed: equal seeds give equal sentences, and a larger count continues the same list.
    """
    random = np.random.default_rng(seed)

    def word() -> str:
        return str(random.choice(MARKERS)) if random.random() < 0.2 else f"w{random.integers(50)}"

    def nearest(words: list[str]) -> list[str]:
        """For each word, the last marker before it."""
        found, latest = [], "-"
        for w in words:
            found.append(latest)
            latest = w if w in MARKERS else latest
        return found

    sentences = []
    for _ in range(count):
        words = [word() for _ in range(random.integers(SHORTEST, LONGEST, endpoint=True))]
        both = zip(nearest(words), nearest(words[::-1])[::-1])
        sentences.append(Sentence(tuple(words), tuple(before + after for before, after in both)))
    return sentences
