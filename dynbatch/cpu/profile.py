"""What was measured to be faster on this machine, question by question: kept in the cache directory and in checkpoints.

An answer may change results by rounding. Within a process it stays as it is, and a checkpoint carries the answers that
were used, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping

import numba
import numpy as np
import threadpoolctl
from llvmlite import binding

from dynbatch.cpu import blas
from dynbatch.cpu.cache import cache_directory
from dynbatch.cpu.team import TEAM

_ROUNDS = 7
_CLEAR = 1.5
"""After two rounds a candidate that takes this many times as long as the best is out."""
_MARGIN = 1.1
"""The first candidate is kept unless another is faster by more than this: noise should not decide."""

_answers: dict[str, str] = {}
"""The answers in use in this process."""


def answer(question: str, candidates: Mapping[str, Callable[[], Callable[[], object]]]) -> str:
    """The name of the fastest candidate: as known in this process, in the cache directory, or measured now.

    Arguments:
        question: what is to be done, and all that the answer depends on but the machine and the libraries.
        candidates: by name, what prepares and returns a function to time; the preferred one first.
    """
    for known in (_answers, _read().get(_machine(), {})):
        if known.get(question) in candidates:
            _answers[question] = known[question]
            return known[question]
    found = _answers[question] = _measure(candidates)
    _write(question, found)
    return found


def state() -> dict[str, str]:
    """The answers in use, for a checkpoint."""
    return dict(_answers)


def set_state(answers: dict[str, str]) -> None:
    """Use the answers of a checkpoint from now on; what it does not know is asked for anew."""
    _answers.clear()
    _answers.update(answers)


def _machine() -> str:
    """Where and with what libraries an answer holds."""
    settings = {k: v for k, v in os.environ.items() if k.startswith(("OPENBLAS_", "MKL_"))}
    processor = binding.get_host_cpu_name(), os.cpu_count()
    versions = importlib.metadata.version("dynbatch"), np.__version__, numba.__version__, blas.mkl_path()
    return repr((platform.node(), *processor, *versions, sorted(settings.items())))


def _measure(candidates: Mapping[str, Callable[[], Callable[[], object]]]) -> str:
    """Time the candidates in turn; the least time of each counts, since noise only adds.

    On one thread: on several, whoever else wants a core would decide, and the spinning threads of the library that was
    called before.
    """
    best = dict.fromkeys(candidates, float("inf"))
    with TEAM.resting(), threadpoolctl.threadpool_limits(1, user_api="blas"):
        functions = {name: prepare() for name, prepare in candidates.items()}
        for run in functions.values():
            run()  # compiled, and in the cache
        for i in range(_ROUNDS):
            for name, time_of_best in best.items():
                if i < 2 or time_of_best < _CLEAR * min(best.values()):
                    begin = time.perf_counter()
                    functions[name]()
                    best[name] = min(time_of_best, time.perf_counter() - begin)
    first = next(iter(candidates))
    fastest = min(best, key=best.__getitem__)
    return fastest if best[fastest] * _MARGIN < best[first] else first


def _read() -> dict[str, dict[str, str]]:
    try:
        known = json.loads((cache_directory() / "profile.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {machine: answers for machine, answers in known.items() if isinstance(answers, dict)}


def _write(question: str, found: str) -> None:
    """Add an answer to the file; of two processes that do so at once one may lose its own, and measures again."""
    file = cache_directory() / "profile.json"
    known = _read()
    known.setdefault(_machine(), {})[question] = found
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, file)
    except OSError:
        pass  # measured again next time; the kernel cache warns about a folder that cannot be written
