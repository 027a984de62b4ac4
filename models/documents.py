"""Documents for the nested models: reading them from files, and generating some.

A file holds one document a line: its class, an integer from 0 on, and its sentences, with bars between them::

    1 a sentence of words | and another one

Empty lines are skipped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dynbatch.errors import FileFormatError
from models.text import WORD, lines


class Document(NamedTuple):
    """Sentences, each its words; and the class, None where it is not known."""

    sentences: tuple[tuple[str, ...], ...]
    label: int | None


def read_documents(path: str | Path, labels: bool = True) -> list[Document]:
    """Reads a file of documents (the format is at the top of this module).

    Arguments:
        path: the file, in UTF-8.
        labels: False drops the classes, so that they can be any word.

    Raises:
        FileFormatError: a line is not well-formed, or the file holds none; the message names file and line.
    """
    documents = []
    for number, text in lines(path):
        label, *words = WORD.findall(text) or [""]
        if not label:
            continue
        if labels and not re.fullmatch("[0-9]+", label):
            raise FileFormatError(f"{path}, line {number}: the class {label!r} is not an integer from 0 on")
        sentences: list[list[str]] = [[]]
        for word in words:
            if word == "|":
                sentences.append([])
            else:
                sentences[-1].append(word)
        if not all(sentences):
            raise FileFormatError(f"{path}, line {number}: sentence {sentences.index([]) + 1} has no words")
        documents.append(Document(tuple(map(tuple, sentences)), int(label) if labels else None))
    if not documents:
        raise FileFormatError(f"{path}: no document in this file; expected lines such as 1 a sentence | another one")
    return documents


TOPICS = 4
FILLERS = 16  # words that mean nothing


def generate(count: int, shortest: int, longest: int, seed: int = 0) -> list[Document]:
    """Random documents whose class is the topic of most of their sentences; of a sentence, the topic it mentions last.

    Arguments:
        count: how many.
        shortest, longest: bounds of the number of sentences, and of the number of words in each.
        seed: equal seeds give equal documents, and a larger count continues the same list.
    """
    random = np.random.default_rng(seed)

    def length() -> int:
        return int(random.integers(shortest, longest, endpoint=True))

    def sentence(topic: int) -> tuple[str, ...]:
        """Words that mention any topics, and near the end this one."""
        words = [f"t{k}" if k < TOPICS else f"w{k - TOPICS}" for k in random.integers(TOPICS + FILLERS, size=length())]
        place = len(words) - 1 - int(random.integers(min(3, len(words))))
        words[place:] = [f"t{topic}", *(f"w{k}" for k in random.integers(FILLERS, size=len(words) - place - 1))]
        return tuple(words)

    documents: list[Document] = []
    while len(documents) < count:
        main = random.integers(TOPICS)
        topics = [int(main if random.random() < 0.5 else random.integers(TOPICS)) for _ in range(length())]
        counts = sorted(((topics.count(topic), topic) for topic in range(TOPICS)), reverse=True)
        if counts[0][0] > counts[1][0]:
            documents.append(Document(tuple(map(sentence, topics)), counts[0][1]))
    return documents
