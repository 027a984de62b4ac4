"""Measuring one configuration: all systems on the same minibatches, in turn, each in its own process.

Losses are compared before anything is timed. The systems then take turns, one timed step each, until every one has had
all its repeats: whatever disturbs the machine for a while disturbs all of them alike.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from bench.systems import PHASES
from bench.worker import Job

TOLERANCE = 1e-4  # relative, between losses
WARM_UP_SECONDS = 2.0  # of each system: dynbatch compiles what has run a number of times
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "DYNBATCH_THREADS",
)
DROPPED_VARIABLES = (  # settings for other purposes: they make products slower, or check and print what is computed
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "DYNBATCH_AUTOBATCH",
    "DYNBATCH_CHECK_VALIDITY",
    "DYNBATCH_DEBUG",
    "DYNBATCH_DTYPE",
)


@dataclass(frozen=True)
class Configuration:
    """What the systems are compared on."""

    model: str
    hidden: int
    batch: int
    mode: str
    threads: int

    def __str__(self) -> str:
        return f"{self.model}, {self.mode}, hidden {self.hidden}, batch {self.batch}, {self.of_threads(self.threads)}"

    @staticmethod
    def of_threads(count: int) -> str:
        """A number of threads in words."""
        return f"{count} thread{'s' if count > 1 else ''}"


class Entry(NamedTuple):
    """What takes part.

    Attributes:
        system, strategy: as in a row of the report.
        step: of an ablation, else None.
        environment: variables of its process and their values.
        without: as in `bench.worker.Job`.
    """

    system: str
    strategy: str | None
    step: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        details = ", ".join(filter(None, (self.strategy, self.step)))
        return f"{self.system} ({details})" if details else self.system


@dataclass
class Findings:
    """What came out: rows of the report, systems that are not here (and why), and systems that went wrong (and how)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class WorkerFault(Exception):
    """A worker process failed or died."""


class Missing(Exception):
    """A worker's library is not here."""


def environment(threads: int) -> dict[str, str]:
    """This process's environment, with the number of threads in every variable that a library may read."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    return kept | dict.fromkeys(THREAD_VARIABLES, str(threads))


class Worker:
    """A worker process, seen from here. `bench.worker` is the other side."""

    def __init__(self, name: str, threads: int, variables: tuple[tuple[str, str], ...] = ()) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self.connection, other = Pipe()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", str(other.fileno())],
                cwd=Path(__file__).parents[1],
                env=environment(threads) | dict(variables),
                pass_fds=[other.fileno()],
                stdout=self.log,
                stderr=self.log,
            )

    def send(self, message: Any) -> None:
        """Ask for something; `receive` waits for the answer."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerFault(f"{self.name} died: {self._last_words()}") from error

    def receive(self) -> Any:
        """The answer to the last message.

        Raises:
            Missing: the library is not installed or does not load.
            WorkerFault: anything else that went wrong.
        """
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerFault(f"{self.name} died: {self._last_words()}") from error
        if kind == "missing":
            raise Missing(content)
        if kind == "failed":
            raise WorkerFault(f"{self.name} failed:\n{content}")
        return content

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker's `Session`."""
        self.send((method, *arguments))
        return self.receive()

    def _last_words(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        return f"exit status {code}\n" + self.log.read()[-2000:].decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def peak(threads: int) -> float:
    """GFLOP/s that NumPy's BLAS reaches with so many threads."""
    worker = Worker("the measurement of BLAS", threads)
    try:
        worker.send(None)
        return worker.receive()
    finally:
        worker.close()


def measure(
    configuration: Configuration,
    entries: list[Entry],
    instances: list,
    sizes: dict[str, int],
    repeats: int,
    blas_peak: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Compare and time the systems.

    Arguments:
        configuration: the model, its size, and what is done with it.
        entries: one for every row wanted.
        instances, sizes: what the model's ``load`` gave.
        repeats: timed steps of each.
        blas_peak: GFLOP/s, what ``blas_share`` is of.
        progress: called with what is done next, and with "timing" after every round of repeats.
    """
    found = Findings()
    workers: dict[Entry, Worker] = {}

    def each(action: Callable[[Worker, Entry], Any]) -> dict[Entry, Any]:
        """What ``action`` gives for every worker; those for which it fails are noted and dropped."""
        results = {}
        for entry, worker in list(workers.items()):
            try:
                results[entry] = action(worker, entry)
            except (Missing, WorkerFault) as error:
                if isinstance(error, Missing):
                    found.missing[entry.system] = str(error)
                else:
                    found.faults.append(f"{configuration}: {error}")
                workers.pop(entry).close()
        return results

    def start(worker: Worker, entry: Entry) -> None:
        c, system, strategy = configuration, entry.system, entry.strategy
        worker.send(Job(c.model, system, strategy, c.hidden, c.batch, c.mode, instances, sizes, entry.without))

    try:
        for entry in entries:
            workers[entry] = Worker(str(entry), configuration.threads, entry.environment)
        progress("starting")
        each(start)
        each(lambda worker, _: worker.receive())
        progress("comparing")
        compared = each(lambda worker, _: worker.ask("compare"))
        for key, fault in differences({key: losses for key, (losses, _) in compared.items()}).items():
            found.faults.append(f"{configuration}: {workers[key].name} is not timed: {fault}")
            workers.pop(key).close()
        progress("warming up")
        tapes = each(lambda worker, _: worker.ask("warm_up", WARM_UP_SECONDS))
        samples: dict[Entry, list[dict[str, float]]] = {key: [] for key in workers}
        for repeat in range(repeats):
            for key, sample in each(lambda worker, _, r=repeat: worker.ask("step", r)).items():
                samples[key].append(sample)
            progress("timing")
        ends = each(lambda worker, _: worker.ask("finish"))
        for key, end in ends.items():
            found.rows.append(row(configuration, key, samples[key], compared[key][1], tapes[key], end, blas_peak))
    finally:
        for worker in workers.values():
            worker.close()
    return found


def differences(losses: dict[Any, list[float]]) -> dict[Any, str]:
    """Who differs by more than `TOLERANCE` from the median of all, and by how much."""
    found = {}
    finite = [[loss for loss in column if math.isfinite(loss)] for column in zip(*losses.values())]
    expected = [statistics.median(column) if column else math.nan for column in finite]
    for key, own in losses.items():
        for number, (loss, right) in enumerate(zip(own, expected), start=1):
            if not abs(loss - right) <= TOLERANCE * abs(right):  # so that NaN differs
                found[key] = f"its loss of minibatch {number} is {loss:.6f}, the median of the systems {right:.6f}"
                break
    return found


def row(
    configuration: Configuration,
    entry: Entry,
    samples: list[dict[str, float]],
    first: float,
    tapes: float | None,
    end: dict[str, Any],
    blas_peak: float,
) -> dict[str, Any]:
    """One row of the report; times in ms, and null for what the system does not have or does not tell.

    A row has ``replay`` where a timed minibatch was put together from recordings; ``tapes_ms`` is what making those of
    one minibatch took. Rows of an ablation have ``step`` in addition.
    """

    def median(name: str) -> float | None:
        return statistics.median(sample[name] for sample in samples) if name in samples[0] else None

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    totals = [sample["total"] for sample in samples]
    gflops = statistics.median(sample["flops"] / sample["total"] for sample in samples) / 1e9
    counts = {name: median(name) for name in ("nodes", "batches", "bytes_gathered")}
    return (
        vars(configuration)
        | {"system": entry.system, "strategy": entry.strategy, "blas": end["blas"], "replay": end["replay"]}
        | {name: None if count is None else round(count) for name, count in counts.items()}
        | {f"{phase}_ms": ms(median(phase)) for phase in PHASES}
        | {"total_ms": ms(median("total")), "min_ms": ms(min(totals)), "max_ms": ms(max(totals))}
        | {"first_ms": ms(first), "tapes_ms": ms(tapes)}
        | {"repeats": len(samples), "peak_mib": end["peak_mib"]}
        | {"gflops": gflops, "blas_share": gflops / blas_peak}
        | ({"step": entry.step} if entry.step else {})
    )
