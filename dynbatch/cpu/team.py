"""Threads that help with one product at a time, from compiled code, without Python's lock.

A job is a compiled function and a number of chunks. Who calls takes chunks too, from the same counter, so that a helper
that is slow to come costs nothing: what it does not take is done without it. Helpers look for work for some
microseconds after a job, since the next often follows, and then sleep. numba's own threads would not do: its
``workqueue`` layer ends the process when two threads of Python use it at once, its ``omp`` layer is slow beside
OpenBLAS (see `dynbatch.cpu.threads`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dynbatch.cpu.jit import jit
from dynbatch.cpu.native import add, call, exchange, load, pause, store

# Where things lie in the team's memory, in bytes; what different threads write does not share a cache line.
_CHUNKS = 0  # how many chunks nobody has taken yet; below 1: none
_DONE = 128  # how many are finished
_BUSY = 256  # whether a job runs
_ACTIVE = 384  # how many threads work, the caller among them
_SLEEPERS = 512
_STOP = 640
_FUNCTION, _JOB = 768, 776
_LOCK, _UNLOCK, _WAIT, _WAKE, _YIELD = 896, 904, 912, 920, 928  # addresses of C functions
_MUTEX, _CONDITION = 1024, 1280
_SPLIT_FROM = 1536
_SIZE = 1664
_C_FUNCTIONS = {
    _LOCK: "pthread_mutex_lock",
    _UNLOCK: "pthread_mutex_unlock",
    _WAIT: "pthread_cond_wait",
    _WAKE: "pthread_cond_broadcast",
    _YIELD: "sched_yield",
}
_CHUNKS_A_THREAD = 2  # so that a thread which is late, or slow, holds up the others less
_LOOKS_A_TURN = 512
"""Looks after which a waiting thread lets another have its core, if one wants it."""
SPLIT_FROM = 1 << 17
"""Element operations from which on a kernel's rows are shared out: see ``python -m bench.splitting``."""
_PATIENCE = 5000
"""How often a helper looks for work before it sleeps: some 100 microseconds."""


@jit(error_model="numpy")
def active(team: int) -> int:
    """How many threads work on a job."""
    return load(team + _ACTIVE)


@jit(error_model="numpy")
def run(team: int, function: int, job: int, chunks: int) -> None:
    """Call ``function(job, i)`` for each ``i`` below ``chunks``, on the threads of the team unless they are busy.

    Arguments:
        team: `Team.address`.
        function: address of a function of two 64-bit integers.
        job: its first argument.
    """
    if load(team + _ACTIVE) < 2 or exchange(team + _BUSY, 1) != 0:
        for i in range(chunks):
            call(function, (job, i))
        return
    store(team + _FUNCTION, function)
    store(team + _JOB, job)
    store(team + _DONE, 0)
    store(team + _CHUNKS, chunks)  # from here on they can be taken
    if load(team + _SLEEPERS) > 0:
        call(load(team + _LOCK), (team + _MUTEX,))
        call(load(team + _WAKE), (team + _CONDITION,))
        call(load(team + _UNLOCK), (team + _MUTEX,))
    finished = _take(team, function, job)
    add(team + _DONE, finished)
    looks = 0
    while load(team + _DONE) < chunks:
        pause()
        looks += 1
        if looks % _LOOKS_A_TURN == 0:  # a helper in the middle of a chunk may want this core
            call(load(team + _YIELD), ())
    store(team + _BUSY, 0)


@jit(error_model="numpy")
def run_rows(team: int, function: int, job: int, size: int) -> None:
    """`run` of a job whose fields 1 and 2 are its rows and, which is set here, the rows of one chunk.

    A kernel's rows do not depend on each other, so that results are the same bits however they are shared out.

    Arguments:
        size: of a row, in element operations: what is small runs on one thread.
    """
    rows: int = load(job + 8)
    chunks = 1
    if rows * size >= load(team + _SPLIT_FROM) and active(team) > 1:
        chunks = max(1, min(rows, _CHUNKS_A_THREAD * active(team)))
    step = (rows + chunks - 1) // chunks
    store(job + 16, step)
    if step == rows:
        call(function, (job, 0))
    else:
        run(team, function, job, (rows + step - 1) // step)


@jit(error_model="numpy")
def _take(team: int, function: int, job: int) -> int:
    """Run chunks until none is left; how many."""
    finished = 0
    while True:
        index = add(team + _CHUNKS, -1) - 1
        if index < 0:
            return finished
        call(function, (job, index))
        finished += 1


@jit(error_model="numpy")
def _has_work(team: int, number: int) -> bool:
    return load(team + _CHUNKS) > 0 and number < load(team + _ACTIVE)


@jit(error_model="numpy")
def _help(team: int, number: int) -> None:
    """What a helper does until the team ends."""
    looks = 0
    while load(team + _STOP) == 0:
        if _has_work(team, number):
            # The first chunk is taken before the job is read: until it is done the job stays.
            index = add(team + _CHUNKS, -1) - 1
            if index >= 0:
                function, job = load(team + _FUNCTION), load(team + _JOB)
                call(function, (job, index))
                add(team + _DONE, 1)
            looks = 0
        elif looks < _PATIENCE:
            pause()
            looks += 1
            if looks % _LOOKS_A_TURN == 0:  # the system may have put this thread on the core of who has the work
                call(load(team + _YIELD), ())
        else:
            call(load(team + _LOCK), (team + _MUTEX,))
            add(team + _SLEEPERS, 1)
            while load(team + _STOP) == 0 and not _has_work(team, number):
                call(load(team + _WAIT), (team + _CONDITION, team + _MUTEX))
            add(team + _SLEEPERS, -1)
            call(load(team + _UNLOCK), (team + _MUTEX,))
            looks = 0


class Team:
    """The helpers of this process.

    Attributes:
        address: what `run` takes.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(_SIZE // 8 + 16, np.int64)
        self.address = -(-self._memory.ctypes.data // 128) * 128
        self._offset = (self.address - self._memory.ctypes.data) // 8
        self._helpers: list[threading.Thread] = []
        self._library = None if os.name == "nt" else ctypes.CDLL(None)
        self._threads = 1
        self._started = False
        self._prepare()

    @property
    def can_help(self) -> bool:
        """Whether there are helpers at all: not on Windows."""
        return self._library is not None

    def set_threads(self, threads: int) -> None:
        """How many threads work on a job, the caller among them, once the team has started."""
        self._threads = threads
        if self._started:
            self._start_helpers()

    def start(self) -> None:
        """Let helpers take part from now on."""
        if not self._started and self._library is not None:  # none on Windows: what is large goes to BLAS there
            self._started = True
            self._start_helpers()

    def split_from(self, operations: int) -> None:
        """From how many element operations on a kernel's rows are shared out, instead of `SPLIT_FROM`."""
        self._set(_SPLIT_FROM, operations)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """No helper takes part meanwhile; for measurements."""
        self._set(_ACTIVE, 1)
        try:
            yield
        finally:
            if self._started:
                self._set(_ACTIVE, self._threads)

    def _start_helpers(self) -> None:
        while len(self._helpers) < self._threads - 1:
            number = len(self._helpers) + 1
            if not _help.signatures:
                _help.compile("void(int64, int64)")
            helper = threading.Thread(target=_help, args=(self.address, number), name=f"dynbatch-{number}", daemon=True)
            self._helpers.append(helper)
            helper.start()
        self._set(_ACTIVE, self._threads)

    def end(self) -> None:
        """End the helpers."""
        if self._library is None:
            return
        self._set(_ACTIVE, 1)
        self._set(_STOP, 1)
        self._library.pthread_mutex_lock(ctypes.c_void_p(self.address + _MUTEX))
        self._library.pthread_cond_broadcast(ctypes.c_void_p(self.address + _CONDITION))
        self._library.pthread_mutex_unlock(ctypes.c_void_p(self.address + _MUTEX))
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()
        self._started = False
        self._set(_STOP, 0)

    def forget(self) -> None:
        """In a forked process, which has none of the threads: start from nothing, at the same address."""
        self._helpers.clear()
        self._started = False
        self._prepare()

    def _prepare(self) -> None:
        self._memory[:] = 0
        self._set(_ACTIVE, 1)
        self._set(_SPLIT_FROM, SPLIT_FROM)
        if self._library is None:
            return
        for field, name in _C_FUNCTIONS.items():
            self._set(field, ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)
        self._library.pthread_mutex_init(ctypes.c_void_p(self.address + _MUTEX), None)
        self._library.pthread_cond_init(ctypes.c_void_p(self.address + _CONDITION), None)

    def _set(self, field: int, value: int) -> None:
        self._memory[self._offset + field // 8] = value


TEAM = Team()
atexit.register(TEAM.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEAM.forget)
