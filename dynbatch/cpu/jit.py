"""numba's compiler with a cache on disk that several processes can fill at once.

numba's own cache keeps the overloads of a function in numbered files and does not lock them: two processes that compile
one function for different types at the same time can each take number one, and the next to load gets the other's code,
which reads its arguments as what they are not. Here a lock file is held while a function is compiled or loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import cfunc, njit

from dynbatch.cpu.cache import cache_directory

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_lock = threading.RLock()
_depth = 0


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like ``numba.njit(cache=True, nogil=True, **options)``, safe against other processes."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(cache=True, nogil=True, **options)(function)
        compile = dispatcher.compile

        def compile_locked(signature: Any) -> Any:
            with _alone():
                return compile(signature)

        dispatcher.compile = compile_locked
        return dispatcher

    return decorate


def c_function(function: Callable[..., Any], signature: str, **options: Any) -> Any:
    """``numba.cfunc(signature, cache=True, **options)(function)``, safe against other processes; has an ``address``.

    What calls it needs none of its code, which would be compiled again with each caller.
    """
    with _alone():
        return cfunc(signature, cache=True, **options)(function)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock file; compiling one function may compile others."""
    global _depth
    with _lock:
        handle = _open_lock() if _depth == 0 else None
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if handle is not None:
                os.close(handle)  # and with it the lock


def _open_lock() -> int | None:
    """A locked file, or None where files cannot be locked; then there is no cache to protect either, or one process."""
    if fcntl is None:
        return None
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "compiling.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        os.close(handle)
        return None
    return handle
