"""CoNLL-U, the format of Universal Dependencies treebanks: https://universaldependencies.org/format.html.

A sentence is a block of lines that an empty line ends: comments, which begin with ``#``, and lines of ten columns with
tabs between them. ID is 1, 2, ... for words, a range (``3-4``) for a token of several words, and a decimal (``8.1``)
for a word that is not written out. Parsers read and write the words only; everything else comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dynbatch.errors import FileFormatError

COLUMNS = 10
ID, FORM, UPOS, HEAD, DEPREL = 0, 1, 3, 6, 7


class Sentence:
    """A sentence, with its tree where it has one.

    Attributes:
        forms, tags: of each word: as it is written, and its part of speech (UPOS).
        heads: of each word the number of its head, from 1; 0 for the root, None where the file has ``_``.
        labels: of each word its relation to its head (DEPREL); None where the file has ``_``.
        lines: all lines of the block, as read.
        place: file and line where it begins, for messages.
    """

    __slots__ = ("forms", "heads", "labels", "lines", "place", "tags")

    def __init__(
        self,
        forms: Sequence[str],
        tags: Sequence[str],
        heads: Sequence[int | None],
        labels: Sequence[str | None],
        lines: Sequence[str] | None = None,
        place: str = "",
    ) -> None:
        self.forms, self.tags, self.heads, self.labels = tuple(forms), tuple(tags), tuple(heads), tuple(labels)
        self.place = place
        self.lines = tuple(self._plain_lines() if lines is None else lines)

    def __len__(self) -> int:
        return len(self.forms)

    def _plain_lines(self) -> Iterator[str]:
        for number, (form, tag) in enumerate(zip(self.forms, self.tags), start=1):
            yield "\t".join([str(number), form, "_", tag, *"______"])

    def with_tree(self, heads: Sequence[int | None], labels: Sequence[str | None]) -> Sentence:
        """The same sentence with other heads and labels."""
        return Sentence(self.forms, self.tags, heads, labels, self.lines, self.place)

    def __str__(self) -> str:
        """The block without the empty line behind it; every line is as read but for HEAD and DEPREL of the words."""
        tree = zip(self.heads, self.labels)
        written = []
        for line in self.lines:
            columns = line.split("\t")
            if columns[ID].isdecimal():
                head, label = next(tree)
                columns[HEAD] = "_" if head is None else str(head)
                columns[DEPREL] = "_" if label is None else label
            written.append("\t".join(columns))
        return "\n".join(written)


def read_conllu(path: str | Path) -> list[Sentence]:
    """Reads a file in CoNLL-U, in UTF-8; lines may end in CRLF.

    Raises:
        FileFormatError: the file holds no sentence or is not well-formed; the message names file and line.
    """
    sentences = [_sentence(path, start, lines) for start, lines in _blocks(path)]
    if not sentences:
        raise FileFormatError(f"{path}, line 1: no sentence in this file; expected lines of {COLUMNS} columns")
    return sentences


def written(sentences: Iterable[Sentence]) -> Iterator[str]:
    """The lines of a file of these sentences, without their ends."""
    for sentence in sentences:
        yield from str(sentence).split("\n")
        yield ""


def check_tree(sentence: Sentence) -> None:
    """Raises a FileFormatError unless the sentence has a tree: a head and a label a word, one root, no cycle."""

    def fail(message: str) -> FileFormatError:
        return FileFormatError(f"{sentence.place}: {message}")

    heads = sentence.heads
    for number, (head, label) in enumerate(zip(heads, sentence.labels), start=1):
        if head is None or label is None:
            raise fail(f"word {number} has no {'head' if head is None else 'label'}")
    roots = [number for number, head in enumerate(heads, start=1) if head == 0]
    if len(roots) != 1:
        raise fail(f"expected one word with head 0, not {len(roots)}")
    safe = {0}  # what is known to hang from the root
    for number in range(1, len(heads) + 1):
        path, word = list[int](), number
        while word not in safe:
            path.append(word)
            safe.add(word)
            word = heads[word - 1]
            if word in path:
                cycle = ", ".join(map(str, sorted(path[path.index(word) :])))
                raise fail(f"the heads of words {cycle} form a cycle")


def _blocks(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Each block of lines with the number of its first one."""
    start, block = 1, list[str]()
    with open(path, "rb") as file:
        for number, encoded in enumerate(file, start=1):
            try:
                line = encoded.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise FileFormatError(f"{path}, line {number}: this is not UTF-8 text") from None
            if line:
                if not block:
                    start = number
                block.append(line)
            elif block:
                yield start, block
                block = []
    if block:
        yield start, block


_ID = re.compile(r"([0-9]+)(?:-([0-9]+)|\.([0-9]+))?")


def _sentence(path: str | Path, start: int, lines: list[str]) -> Sentence:
    def fail(number: int, message: str) -> FileFormatError:
        return FileFormatError(f"{path}, line {number}: {message}")

    words: list[tuple[int, list[str]]] = []  # each with its line's number
    for number, line in enumerate(lines, start=start):
        if line.startswith("#"):
            continue
        columns = line.split("\t")
        following = len(words) + 1
        if len(columns) != COLUMNS:
            raise fail(number, f"expected {COLUMNS} columns with tabs between them, not {len(columns)}")
        match = _ID.fullmatch(columns[ID])
        if match is None:
            raise fail(number, f"the ID {columns[ID]!r} is not a number, a range like 3-4 or a decimal like 8.1")
        first, last, part = (None if text is None else int(text) for text in match.groups())
        in_order = {following} if part is None else {len(words)}
        if first not in in_order or (last is not None and last < following):
            raise fail(number, f"the ID {columns[ID]!r} is out of order: word {following} comes next")
        if last is None and part is None:
            words.append((number, columns))
    if not words:
        raise fail(start, "a sentence without words")
    heads = list[int | None]()
    for own, (number, columns) in enumerate(words, start=1):
        text = columns[HEAD]
        if text == "_":
            heads.append(None)
        elif not re.fullmatch("[0-9]+", text) or int(text) > len(words):
            raise fail(number, f"the HEAD {text!r} is neither _ nor a word's number, 0 to {len(words)}")
        elif int(text) == own:
            raise fail(number, f"word {own} is its own head")
        else:
            heads.append(int(text))
    forms, tags, labels = ([columns[k] for _, columns in words] for k in (FORM, UPOS, DEPREL))
    known = [None if label == "_" else label for label in labels]
    return Sentence(forms, tags, heads, known, lines, f"{path}, line {start}")
