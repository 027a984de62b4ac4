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
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import typeof

from dynbatch.cpu.cache import cache_directory
from dynbatch.cpu.jit import without_cache

_SPECIAL = Path(__file__).with_name("special.py").read_text()
"""Inlined into the kernels, and so part of each one's hash."""

_loaded: dict[str, dict[str, Any]] = {}
_warned = False


def load(text: str) -> dict[str, Any]:
    """The names that this source defines; its functions come from the cache if they have been compiled before."""
    name = digest(text)
    found = _loaded.get(name)
    if found is None:
        found = _loaded[name] = _load(name, text)
    return found


class StillCompiling(Exception):
    """What a function raises that another thread compiles."""


def first_call(
    namespace: dict[str, Any], name: str, text: str, prepare: Callable[[], None], background: bool = False
) -> Callable[..., None]:
    """Stands for function ``name`` of this source in a namespace until it was called once.

    numba reads and writes its own files at the first call, so that a fault of those shows here. In the background,
    the first call lets another thread compile, and calls raise `StillCompiling` until that is done.

    Arguments:
        prepare: compiles what the function calls by address; may be called more than once.
    """
    compiling: list[threading.Thread] = []

    def call(*args: Any) -> None:
        if background and not compiling:
            types = tuple([typeof(a) for a in args])  # type: ignore[no-untyped-call]
            compiling.append(threading.Thread(target=_compile, args=(text, prepare, name, types), daemon=True))
            compiling[0].start()
        if compiling and compiling[0].is_alive():
            raise StillCompiling
        prepare()
        try:
            load(text)[name](*args)
        except Exception as error:
            _loaded[digest(text)] = _in_memory(digest(text), text, error)
            load(text)[name](*args)
        namespace[name] = load(text)[name]

    return call


def _compile(text: str, prepare: Callable[[], None], name: str, types: tuple[Any, ...]) -> None:
    # a fault shows again at the next call, which reports it
    with suppress(Exception):
        prepare()
        load(text)[name].compile(types)


def is_compiled(text: str) -> bool:
    """Whether a function of this source can be loaded without compiling."""
    name = digest(text)
    return name in _loaded or any((cache_directory() / "kernels" / "__pycache__").glob(f"dynbatch_kernel_{name}.*.nbi"))


def digest(text: str) -> str:
    """What a source is called in the cache."""
    return hashlib.sha256((_SPECIAL + text).encode()).hexdigest()[:24]


def _load(name: str, text: str) -> dict[str, Any]:
    module_name = f"dynbatch_kernel_{name}"
    try:
        path = _written(name, text)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # numba's cache finds the function's globals by the module's name
        spec.loader.exec_module(module)
        return module.__dict__
    except Exception as error:  # any fault of the cache: the functions do not need it
        return _in_memory(name, text, error)


def _in_memory(name: str, text: str, error: Exception) -> dict[str, Any]:
    """The functions without a cache, and a warning that says what is wrong with that."""
    _warn(error)
    namespace: dict[str, Any] = {"__name__": f"dynbatch_kernel_{name}"}
    with without_cache():
        exec(compile(text, f"<kernel {name}>", "exec"), namespace)
    return namespace


def _written(name: str, text: str) -> Path:
    """The source file, written unless it is there as it should be."""
    folder = cache_directory() / "kernels"
    path = folder / f"dynbatch_kernel_{name}.py"
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
