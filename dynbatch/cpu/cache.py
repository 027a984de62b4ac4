"""Where dynbatch keeps what it can make again: compiled kernels, and what was measured on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Where generated kernels go: ``DYNBATCH_CACHE``, else the platform's place for caches."""
    chosen = os.environ.get("DYNBATCH_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dynbatch"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "dynbatch"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynbatch"
