"""Settings that hold within a ``with`` block, and looking at what ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynbatch.config import check_strategy
from dynbatch.graph import Expression, state

if TYPE_CHECKING:
    from dynbatch.batching.plan import Plan


@contextmanager
def autobatch(strategy: str) -> Iterator[None]:
    """Use another batching strategy for what runs within the block.

    ```python
    with dy.autobatch("depth"):
        loss.value()
    ```

    Raises:
        ConfigurationError: an unknown strategy; lists the valid ones.
    """
    strategy = check_strategy(strategy)
    before, state.strategy = state.strategy, strategy
    try:
        yield
    finally:
        state.strategy = before


@contextmanager
def no_grad() -> Iterator[None]:
    """Do not keep intermediate values for a backward pass of what runs within the block.

    Takes less memory. A backward pass through such values is still right: it computes them again.
    """
    before, state.keep = state.keep, False
    try:
        yield
    finally:
        state.keep = before


def forward(expressions: list[Expression]) -> None:
    """Compute several expressions in one plan, before their values are asked for one by one."""
    from dynbatch.batching.run import forward

    forward(expressions)


def plan(direction: str = "forward") -> Plan:
    """What the last plan of this thread did: nodes, batches, rows, bytes gathered, times; print it for a table.

    Arguments:
        direction: ``"forward"``, or ``"backward"`` for the last backward plan.
    """
    from dynbatch.batching.run import plan

    return plan(direction)
