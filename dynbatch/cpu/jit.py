"""numba's compiler with a cache on disk that several processes can fill at once.

numba's own cache keeps the overloads of a function in numbered files and does not lock them: two processes that compile
one function for different types at the same time can each take number one, and the next to load gets the other's code,
which reads its arguments as what they are not. Here a lock is held while a function is compiled or loaded: one byte of
a lock file, a different one for each function, so that processes wait only where they want the same one.

Compiled code contains the functions that it calls, but numba's cache looks at the file of the function itself only: it
would go on with the old code of a function in another file. Here it looks at all files that are compiled.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba import cfunc, njit
from numba.core.caching import CompileResultCacheImpl

from dynbatch.cpu.cache import cache_directory

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_caching = True
_lock = threading.RLock()
_handle: int | None = None  # of the lock file, while something is compiled
_held: list[int] = []  # the bytes of it that are locked, one for each function that is being compiled


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like ``numba.njit(cache=True, nogil=True, **options)``, safe against other processes."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(cache=_caching, nogil=True, **options)(function)
        compile = dispatcher.compile

        def compile_locked(signature: Any) -> Any:
            with _alone(function):
                return compile(signature)

        dispatcher.compile = compile_locked
        return dispatcher

    return decorate


def c_function(function: Callable[..., Any], signature: str, **options: Any) -> Any:
    """``numba.cfunc(signature, cache=True, **options)(function)``, safe against other processes; has an ``address``.

    What calls it by its address needs none of its code, which would be compiled again with each caller. The address is
    valid as long as the result lives.
    """
    with _alone(function):
        return cfunc(signature, cache=_caching, **options)(function)


def job_function(**options: Any) -> Callable[[Callable[[Any, int], None]], Any]:
    """Decorates ``function(job, index)``, a `c_function` that gets its job as a pointer to 64-bit integers."""
    return functools.partial(c_function, signature="void(CPointer(int64), int64)", **options)


@contextmanager
def without_cache() -> Iterator[None]:
    """What is decorated meanwhile is compiled anew in each process, and not kept."""
    global _caching
    before, _caching = _caching, False
    try:
        yield
    finally:
        _caching = before


@contextmanager
def _alone(function: Callable[..., Any]) -> Iterator[None]:
    """Hold the lock of a function; compiling one may compile others, which call no function that waits for them."""
    global _handle
    with _lock:
        byte = _byte(function)
        if byte in _held:  # it is compiled for other types within itself
            yield
            return
        if not _held:
            _handle = _open_lock_file()
        _held.append(byte)
        try:
            _lock_byte(byte, True)
            yield
        finally:
            _lock_byte(byte, False)
            _held.remove(byte)
            if not _held and _handle is not None:
                os.close(_handle)
                _handle = None


def _byte(function: Callable[..., Any]) -> int:
    """The byte that stands for a function; no two functions share one but by a chance of one in 2**55."""
    name = f"{function.__module__} {function.__qualname__}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def _open_lock_file() -> int | None:
    """The lock file, or None where files cannot be locked; then there is no cache to protect either, or one process."""
    if fcntl is None:
        return None
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "compiling.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None


def _lock_byte(byte: int, locks: bool) -> None:
    if _handle is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(_handle, fcntl.LOCK_EX if locks else fcntl.LOCK_UN, 1, byte)


@functools.cache
def _sources() -> str:
    """A hash of the compiled files beside this one."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(t for t in texts if b"\n@jit(" in t or b"\n@intrinsic" in t)).hexdigest()


class _Locator:
    """Tells numba's cache where it lies, as numba's own locators do, and when it is stale."""

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        """The locator for functions of these files and for kernels, whose text is written; None for others."""
        if not function.__module__.startswith((__package__, "dynbatch_kernel_")):
            return None
        others = (other.from_function(function, file) for other in _locators if other is not cls)
        found = next((locator for locator in others if locator is not None), None)
        if found is not None:
            stamp = found.get_source_stamp()
            found.get_source_stamp = lambda: (stamp, _sources())
        return found


_locators: list[Any] = CompileResultCacheImpl._locator_classes
_locators.insert(0, _Locator)
