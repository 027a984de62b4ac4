"""What the batches of plans cost on a device, measured by events around each command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynbatch.errors import ConfigurationError


class BatchProfile:
    """What one batch took on the device.

    Attributes:
        name: of the op or cell.
        rows: nodes in the batch.
        commands: kernels and products.
        kernel_seconds: time in them.
        gap_seconds: time between them, and to the batch before.
        nbytes: of operands, weights and results, each read or written once.
    """

    __slots__ = ("commands", "gap_seconds", "kernel_seconds", "name", "nbytes", "rows")

    def __init__(self, name: str, rows: int, nbytes: int) -> None:
        self.name = name
        self.rows = rows
        self.nbytes = nbytes
        self.commands = 0
        self.kernel_seconds = self.gap_seconds = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second, over the time in kernels."""
        return self.nbytes / self.kernel_seconds if self.kernel_seconds else 0.0


class Profile:
    """What ran on the device inside of `profile`; print it for a table.

    Attributes:
        batches: a `BatchProfile` for each batch, in order.
    """

    def __init__(self) -> None:
        self.batches: list[BatchProfile] = []

    @property
    def kernel_seconds(self) -> float:
        """Time in kernels and products."""
        return sum(b.kernel_seconds for b in self.batches)

    @property
    def gap_seconds(self) -> float:
        """Time between them, in which the device waited for the host."""
        return sum(b.gap_seconds for b in self.batches)

    def __repr__(self) -> str:
        lines = [
            f"{len(self.batches)} batches, {sum(b.commands for b in self.batches)} launches: "
            f"{self.kernel_seconds * 1e3:.3f} ms in kernels, {self.gap_seconds * 1e3:.3f} ms between them",
            f"{'program':<28} {'batches':>7} {'rows':>8} {'launches':>8} {'kernels ms':>10} {'gaps ms':>8} "
            f"{'MiB':>8} {'GB/s':>8}",
        ]
        groups: dict[str, list[BatchProfile]] = {}
        for batch in self.batches:
            groups.setdefault(batch.name, []).append(batch)
        for name, found in sorted(groups.items(), key=lambda g: -sum(b.kernel_seconds for b in g[1])):
            seconds, nbytes = sum(b.kernel_seconds for b in found), sum(b.nbytes for b in found)
            lines.append(
                f"{name:<28.28} {len(found):>7} {sum(b.rows for b in found):>8} {sum(b.commands for b in found):>8} "
                f"{seconds * 1e3:>10.3f} {sum(b.gap_seconds for b in found) * 1e3:>8.3f} {nbytes / 2**20:>8.2f} "
                f"{nbytes / seconds / 1e9 if seconds else 0:>8.1f}"
            )
        return "\n".join(lines)


class _Profiler:
    """Attributes: current: where measurements go, if they are wanted."""

    current: Profile | None = None

    def run(self, driver: Any, commands: Any) -> None:
        """Run commands with an event before and behind each."""
        assert self.current is not None
        marks = []
        for _, function, args in (*commands.shared, *commands.batches):
            begin = driver.record_event()
            function(*args)
            marks.append((begin, driver.record_event()))
        driver.synchronize()
        ends = [(None, None, len(commands.shared)), *((r, j, len(commands.shared) + e) for r, j, e in commands.ends)]
        ends.append((None, None, len(marks)))
        start, previous = 0, None
        for routine, job, end in ends:
            if end == start:
                continue
            name, rows, nbytes = ("(parameters)", 0, 0) if routine is None else routine.cost(job)
            found = BatchProfile(name, rows, nbytes)
            for begin, finish in marks[start:end]:
                found.commands += 1
                found.kernel_seconds += driver.elapsed(begin, finish)
                found.gap_seconds += driver.elapsed(previous, begin) if previous is not None else 0.0
                previous = finish
            self.current.batches.append(found)
            start = end


profiler = _Profiler()
"""Of the process."""


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure what runs on the device inside.

    ```python
    with dy.profile() as found:
        loss.backward()
    print(found)
    ```

    An event before and behind each kernel costs time of its own: gaps are wider than without, and nothing is captured
    as a graph. ``(parameters)`` is what depends on parameters alone, and what sums over a whole backward pass.

    Raises:
        ConfigurationError: it is measured already.
    """
    if profiler.current is not None:
        raise ConfigurationError("profile() inside of profile()")
    profiler.current = Profile()
    try:
        yield profiler.current
    finally:
        profiler.current = None
