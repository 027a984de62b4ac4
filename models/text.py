"""Lines of text files, read so that a fault has a place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dynbatch.errors import FileFormatError

WORD = re.compile(r"\S+", re.ASCII)  # ASCII: a word may hold a non-breaking space ("8 1/2" in SST)


def lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line of a file in UTF-8.

    Raises:
        FileFormatError: the file is not UTF-8; the message names file, line and column.
    """
    with open(path, "rb") as file:
        for number, encoded in enumerate(file, start=1):
            try:
                yield number, encoded.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"{path}, line {number}, column {error.start + 1}: this is not UTF-8 text"
                raise FileFormatError(message) from None
