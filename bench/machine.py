"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("dynbatch", "dyNET38", "torch", "numpy", "numba", "mkl")


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that matter for speed; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def load() -> float | None:
    """Processes that wanted to run in the last minute, on average; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def description() -> dict[str, Any]:
    """``machine`` of the JSON report, but for the peaks of BLAS, which `bench.measure` finds."""
    return {
        "processor": processor(),
        "cores": cores(),
        "load": load(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
