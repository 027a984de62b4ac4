"""Which modules are compiled, and whether it is the compiled ones that are imported.

The modules that record are plain Python. Where there is a compiler, the build (`setup.py`) also compiles them with
Cython, by the C types in the ``.pxd`` file beside each. Both do the same, the compiled ones in a quarter of the time or
less. The build leaves a digest of the sources that it compiled: modules compiled from other sources than are here are
not used.

Two modules are there twice, since they are about what Python has no words for: `watch.py` and `words.py` stand in,
uncompiled, for `watch.pyx` and `words.pyx`.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

MODULES = (
    "signature",
    "words",
    "graph",
    "watch",
    "ops.record",
    "recorder",
    "static",
    "functions.arithmetic",
    "functions.lists",
    "functions.lookups",
    "functions.losses",
    "functions.products",
)
"""Names within the package."""

STAMP = f"compiled{importlib.machinery.EXTENSION_SUFFIXES[0]}.txt"
"""Name of the file in the package that holds the digest: one for each kind of interpreter, as for the modules."""

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def digest(folder: str = _FOLDER) -> str:
    """A line for each source of the modules, in the package that lies in ``folder``: SHA-256 and the file's path."""
    lines = []
    for module in MODULES:
        for suffix in (".py", ".pyx", ".pxd"):
            name = module.replace(".", "/") + suffix
            path = os.path.join(folder, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    lines.append(f"{hashlib.sha256(file.read()).hexdigest()} {name}\n")
    return "".join(lines)


def built_from(folder: str = _FOLDER) -> str:
    """The digest of the sources that were compiled; empty if none were."""
    path = os.path.join(folder, STAMP)
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


class _Sources:
    """Finds the sources of the modules before Python finds what they were compiled to."""

    names = frozenset(f"dynbatch.{module}" for module in MODULES)

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The module as Python code; None for all others."""
        if name not in cls.names or not path:
            return None
        loader = (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES)
        return importlib.machinery.FileFinder(path[0], loader).find_spec(name)


def choose() -> bool:
    """Settle which ones are imported, before any is; returns whether it is the compiled ones.

    ``DYNBATCH_PURE=1`` in the environment is for the Python code, whatever there is.
    """
    from dynbatch.config import truth

    pure = truth(os.environ.get("DYNBATCH_PURE", ""))
    found = "" if pure else built_from()
    if found and found == digest():
        return True
    if found:
        warnings.warn(
            "dynbatch's compiled modules were built from other sources than are there now, which are used as they are, "
            "uncompiled: `make setup` in the checkout (or installing the package again) builds them anew",
            RuntimeWarning,
            stacklevel=2,
        )
    sys.meta_path.insert(0, _Sources)
    return False


in_use = __name__ == "dynbatch.compiled" and choose()  # setup.py runs this file apart from the package
"""Whether the compiled modules are imported."""
