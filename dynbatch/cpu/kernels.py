"""Compiled kernels on disk: generated source lies in the user's cache directory, where numba's own cache works.

A source file is written once, atomically, under the hash of its text (numba keys its cache by the file's time). A
cache that cannot be written or read costs compiling again in each process, and one warning.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynbatch.cpu.cache import cache_directory

_SPECIAL = Path(__file__).with_name("special.py").read_text()
"""Inlined into the kernels, and so part of each one's hash."""

_loaded: dict[str, Callable[..., Any]] = {}
_warned = False


def load_kernel(text: str) -> Callable[..., Any]:
    """The function ``kernel`` of this source, from the cache if it has been compiled before."""
    digest = _digest(text)
    found = _loaded.get(digest)
    if found is None:
        found = _loaded[digest] = _load(digest, text)
    return found


def call_first(text: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Call the kernel of this source for the first time, and return what to call from then on.

    numba reads and writes its own files at the first call, so that a fault of those shows here.
    """
    kernel = load_kernel(text)
    try:
        kernel(*args)
    except Exception as error:
        kernel = _loaded[_digest(text)] = _in_memory(_digest(text), text, error)
        kernel(*args)
    return kernel


def is_compiled(text: str) -> bool:
    """Whether the kernel of this source can be loaded without compiling."""
    digest = _digest(text)
    if digest in _loaded:
        return True
    return any((cache_directory() / "kernels" / "__pycache__").glob(f"dynbatch_kernel_{digest}.kernel-*.nbi"))


def _digest(text: str) -> str:
    return hashlib.sha256((_SPECIAL + text).encode()).hexdigest()[:24]


def _load(digest: str, text: str) -> Callable[..., Any]:
    name = f"dynbatch_kernel_{digest}"
    try:
        path = _written(digest, text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # numba's cache finds the kernel's globals by the module's name
        spec.loader.exec_module(module)
        return module.kernel
    except Exception as error:  # any fault of the cache: the kernel does not need it
        return _in_memory(digest, text, error)


def _in_memory(digest: str, text: str, error: Exception) -> Callable[..., Any]:
    """The kernel without a cache, and a warning that says what is wrong with that."""
    _warn(error)
    namespace: dict[str, Any] = {"__name__": f"dynbatch_kernel_{digest}"}
    text = text.replace("from dynbatch.cpu.jit import jit", "from numba import njit as jit")  # no cache
    exec(compile(text, f"<kernel {digest}>", "exec"), namespace)
    return namespace["kernel"]


def _written(digest: str, text: str) -> Path:
    """The source file, written unless it is there as it should be."""
    folder = cache_directory() / "kernels"
    path = folder / f"dynbatch_kernel_{digest}.py"
    try:
        if path.read_text() == text:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
    return path


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"dynbatch: the kernel cache in {cache_directory()} cannot be used ({error}); compiling in memory. "
            f"Set DYNBATCH_CACHE to a folder that can be written",
            stacklevel=2,
        )
