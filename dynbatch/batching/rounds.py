"""What a `dynbatch.map` did: its rounds, and their batches together."""

from __future__ import annotations

from typing import NamedTuple

from dynbatch.batching.plan import Plan


class Round(NamedTuple):
    """One round of a map.

    Attributes:
        instances: how many waited for what it computed.
        nodes: how many ran.
        batches: in which they ran.
    """

    instances: int
    nodes: int
    batches: int

    @property
    def rows_per_batch(self) -> float:
        """Nodes a batch, on average."""
        return self.nodes / self.batches if self.batches else 0.0


class MapPlan(Plan):
    """The plans of a map's rounds together; print it for a table.

    Attributes:
        instances: how many were begun, those of nested maps among them.
        rounds: a `Round` for each, in order.
    """

    def __init__(self, strategy: str) -> None:
        super().__init__("map", strategy)
        self.instances = 0
        self.rounds: list[Round] = []

    def add_round(self, instances: int, plans: list[Plan]) -> None:
        """Report a round, in which as many instances waited for what these plans computed."""
        nodes, batches = sum(p.nodes for p in plans), sum(p.batches for p in plans)
        self.rounds.append(Round(instances, nodes, batches))
        for plan in plans:
            self.batch_reports += plan.batch_reports
            self.ran.update(plan.ran)
            self.schedule_seconds += plan.schedule_seconds
            self.run_seconds += plan.run_seconds

    def __repr__(self) -> str:
        waited = [r.instances for r in self.rounds]
        line = f"map of {self.instances} instances in {len(waited)} rounds"
        if waited:
            rows = self.nodes / self.batches if self.batches else 0.0
            line += (
                f": {sum(waited) / len(waited):.1f} instances a round ({min(waited)} to {max(waited)}), "
                f"{rows:.1f} rows a batch"
            )
        return f"{line}\n{super().__repr__()}"
