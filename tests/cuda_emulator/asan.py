"""AddressSanitizer, where kernels are compiled with it: what may not be touched, and what a process needs."""

from __future__ import annotations

import ctypes
import os
import subprocess

from dynbatch.errors import ConfigurationError

ENABLED = os.environ.get("DYNBATCH_EMULATOR_ASAN") == "1"
_OPTIONS = "detect_leaks=0"  # Python keeps memory until the process ends


def environment() -> dict[str, str]:
    """The variables under which a Python process starts with AddressSanitizer loaded."""
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {"DYNBATCH_EMULATOR_ASAN": "1", "LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": _OPTIONS}


class Shadow:
    """AddressSanitizer's memory of which bytes may be touched.

    Raises:
        ConfigurationError: it is not loaded, and could not be any more.
    """

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        if not hasattr(process, "__asan_init"):
            variables = " ".join(f"{name}={value}" for name, value in environment().items())
            raise ConfigurationError(f"DYNBATCH_EMULATOR_ASAN=1 takes a process that was started with {variables}")
        self._poison = process["__asan_poison_memory_region"]
        self._unpoison = process["__asan_unpoison_memory_region"]
        self._poison.argtypes = self._unpoison.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def poison(self, address: int, nbytes: int) -> None:
        """A kernel that touches these bytes ends the process, with a report."""
        self._poison(address, nbytes)

    def unpoison(self, address: int, nbytes: int) -> None:
        """These bytes may be touched again."""
        self._unpoison(address, nbytes)
