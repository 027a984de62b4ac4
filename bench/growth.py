"""How time per node changes with the number of nodes and with the batch size: ``python -m bench --growth``.

Forward passes only, under the first of ``--hidden`` and of ``--threads``, of the systems of dynbatch under each of
``--strategies``.
"""

from __future__ import annotations

import statistics
from typing import Any

import bench.measure
from bench.measure import Entry, Worker
from bench.worker import Job

NODES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
BATCHES = tuple(2**e for e in range(10))
MOST_NODES = 2_000_000  # of all repeats of one size together; at least `FEWEST` repeats
FEWEST = 3
PROBE = 256  # instances, to learn how many nodes one has
PHASES = ("record", "schedule", "run", "total")


def measure(
    model: str, hidden: int, threads: int, entry: Entry, instances: list, sizes: dict[str, int], repeats: int
) -> list[dict[str, Any]]:
    """The rows of one system of dynbatch; see `row`.

    Raises:
        WorkerFault: its process failed or died.
    """
    worker = Worker(str(entry), threads, entry.environment)
    try:
        worker.send(Job(model, entry.system, entry.strategy, hidden, 1, "infer", instances, sizes))
        worker.receive()
        worker.ask("warm_up", bench.measure.WARM_UP_SECONDS)
        per_instance = worker.ask("grow", PROBE, 1)[0]["nodes"] / PROBE
        counts = [("nodes", max(1, round(nodes / per_instance))) for nodes in NODES]
        counts += [("batch size", count) for count in BATCHES]
        rows = []
        for against, count in counts:
            times = min(repeats, max(FEWEST, int(MOST_NODES / (count * per_instance))))
            samples = worker.ask("grow", count, times)
            rows.append(row(model, hidden, threads, entry, against, count, samples))
        return rows
    finally:
        worker.close()


def row(
    model: str, hidden: int, threads: int, entry: Entry, against: str, count: int, samples: list[dict[str, float]]
) -> dict[str, Any]:
    """One size: medians of nodes, of batches and of the microseconds that a node takes in each phase."""
    found = {"model": model, "hidden": hidden, "threads": threads, "system": entry.system, "strategy": entry.strategy}
    found |= {"against": against, "instances": count, "repeats": len(samples)}
    found |= {name: round(statistics.median(sample[name] for sample in samples)) for name in ("nodes", "batches")}
    return found | {
        f"{phase}_us": 1e6 * statistics.median(sample[phase] / sample["nodes"] for sample in samples)
        for phase in PHASES
    }
