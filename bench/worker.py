"""One system in a process of its own: ``python -m bench.worker DESCRIPTOR``, started by `bench.measure`.

The descriptor is one end of a pipe. A `Job` comes first; after it, each message names a method of `Session` and its
arguments. Every message is answered by (kind, content): ``done`` and the result, ``missing`` and why, or ``failed``
and a traceback.
"""

from __future__ import annotations

import gc
import importlib
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench import models
from bench.systems import SYSTEMS, MissingPeer, clock

SEED = 1
TIMED_FROM = 1000  # number of the first timed minibatch; those before it are compared and warmed up with
COMPARED = 3  # minibatches whose losses are compared: in training each depends on the updates before it
WARM_UP_STEPS = 5
QUIET_CHECK = 0.004  # seconds; see `settle`
PEAK_SIZE = 2048

PASSES = {
    "horizontal fusion": ("dynbatch.cpu.code", "fuse_matmul", lambda program: program),
    "layout": ("dynbatch.batching.execution", "arrange", lambda pending, order, starts, placed: order),
}
"""Where dynbatch calls a pass, and what does nothing in its place."""


@dataclass
class Job:
    """What a worker is to do.

    Attributes:
        model, system, strategy, hidden, batch, mode: as in a row of the report.
        instances, sizes: what the model's ``load`` gave.
        without: passes of dynbatch that are left out, for the ablation; see `PASSES`.
    """

    model: str
    system: str
    strategy: str | None
    hidden: int
    batch: int
    mode: str
    instances: list
    sizes: dict[str, int]
    without: tuple[str, ...] = ()


class Minibatches:
    """An endless sequence of minibatches: the data reshuffled for every pass over it, the same for all systems."""

    def __init__(self, instances: list, size: int) -> None:
        self.instances = instances
        self.size = size
        self.per_pass = len(instances) // size
        self.shuffled: tuple[int, np.ndarray] | None = None
        if not self.per_pass:
            raise ValueError(f"{len(instances)} instances do not fill a minibatch of {size}")

    def __getitem__(self, number: int) -> list:
        current, position = divmod(number, self.per_pass)
        if self.shuffled is None or self.shuffled[0] != current:
            self.shuffled = current, np.random.default_rng([SEED, current]).permutation(len(self.instances))
        chosen = self.shuffled[1][position * self.size : (position + 1) * self.size]
        return [self.instances[k] for k in chosen]


class Session:
    """A system with its model, as the benchmark drives it."""

    def __init__(self, job: Job) -> None:
        model = models.find(job.model)
        for name in job.without:
            leave_out(name)
        self.minibatches = Minibatches(job.instances, job.batch)
        weights = model.weights(job.hidden, job.sizes, np.random.default_rng(SEED))
        self.system = SYSTEMS[job.system](model.PROGRAMS[job.system], weights, job.strategy, job.batch)
        self.run = getattr(self.system, job.mode)
        self.passes = 1 if job.mode == "infer" else 3  # products with weights: forward, and two in backward
        self.flops = lambda instance: model.flops(instance, job.hidden, job.sizes)

    def version(self) -> str:
        """Of the library."""
        return self.system.version

    def compare(self) -> tuple[list[float], float]:
        """Losses of the first minibatches, and the seconds that the very first one took. Weights are put back."""
        first, losses = None, []
        for number in range(COMPARED):
            loss, phases = self.run(self.minibatches[number])
            first = phases["total"] if first is None else first
            losses.append(loss)
        self.system.restore()
        settle()
        return losses, first

    def warm_up(self, seconds: float) -> float | None:
        """Steps that are not timed, at least for so long. Weights are put back.

        Returns what recording the tapes of a minibatch takes, in seconds, for a system that has tapes: on average over
        all instances but those of the minibatches that were compared, whose tapes exist.
        """
        recorded = self.remember()
        begin, number = clock(), COMPARED
        while number < COMPARED + WARM_UP_STEPS or clock() - begin < seconds:
            self.run(self.minibatches[number])
            number += 1
        self.system.restore()
        gc.collect()
        gc.freeze()  # what is there by now stays, and is not gone through again and again
        settle()
        return recorded

    def remember(self) -> float | None:
        """See `warm_up`."""
        remember = self.system.program.remember
        if remember is None:
            return None
        begin, size = clock(), self.minibatches.size
        seen = {id(instance) for number in range(COMPARED) for instance in self.minibatches[number]}
        new = [instance for instance in self.minibatches.instances if id(instance) not in seen]
        remember(new)
        return (clock() - begin) / len(new) * size if new else None

    def step(self, repeat: int) -> dict[str, float]:
        """One timed step: seconds of its phases and in ``total``, ``flops``, and the counts of the system.

        Another one goes before it, untimed: while the others had their turns caches went cold and cores to sleep, and
        in a loop over minibatches they do not.
        """
        self.run(self.minibatches[TIMED_FROM + 2 * repeat])
        batch = self.minibatches[TIMED_FROM + 2 * repeat + 1]
        _, phases = self.run(batch)
        settle()
        return phases | self.system.counts() | {"flops": self.passes * sum(map(self.flops, batch))}

    def grow(self, count: int, repeats: int) -> list[dict[str, float]]:
        """Timed steps on minibatches of ``count`` instances drawn at random, after one that is not timed."""
        samples = []
        for repeat in range(1 + repeats):
            random = np.random.default_rng([SEED, count, repeat])
            chosen = random.integers(len(self.minibatches.instances), size=count)
            _, phases = self.run([self.minibatches.instances[k] for k in chosen])
            samples.append(phases | self.system.counts())
        return samples[1:]

    def finish(self) -> dict[str, Any]:
        """``peak_mib`` of the process, ``blas``, and ``replay``: whether instances were recorded before."""
        replay = self.system.program.remember is not None
        return {"peak_mib": peak_mib(), "blas": self.system.blas(), "replay": replay}


def leave_out(name: str) -> None:
    """Make a pass of `PASSES` do nothing, in this process."""
    module, function, nothing = PASSES[name]
    setattr(importlib.import_module(module), function, nothing)


def settle() -> None:
    """Wait until this process's threads sleep: after their work some libraries' threads spin for up to 0.2 s.

    Without this they would take the processor from the system whose turn is next.
    """
    for _ in range(100):
        begin = time.process_time()
        time.sleep(QUIET_CHECK)
        if time.process_time() - begin < QUIET_CHECK / 4:
            return


def peak_mib() -> float:
    """The largest resident size that this process had, in MiB."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            kib = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # elsewhere than on Linux; there it may be that of the parent
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kib) / 1024


def peak_gflops() -> float:
    """The most that NumPy's BLAS reaches on a large float32 product, in GFLOP/s."""
    x = np.random.default_rng(SEED).standard_normal((PEAK_SIZE, PEAK_SIZE), np.float32)
    y, times = np.empty_like(x), []
    for _ in range(8):
        begin = clock()
        np.matmul(x, x, out=y)
        times.append(clock() - begin)
    return 2e-9 * PEAK_SIZE**3 / min(times)


def answered(function: Any, *arguments: Any) -> tuple[str, Any]:
    """The answer to a message."""
    try:
        return "done", function(*arguments)
    except MissingPeer as error:
        return "missing", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def main() -> None:
    """Serve until the other end is closed."""
    connection = Connection(int(sys.argv[1]))
    try:
        job = connection.recv()
        if job is None:
            connection.send(answered(peak_gflops))
            return
        kind, content = answered(Session, job)
        connection.send((kind, None if kind == "done" else content))
        while kind == "done":
            name, *arguments = connection.recv()
            connection.send(answered(getattr(content, name), *arguments))
    except EOFError:
        pass


if __name__ == "__main__":
    main()
