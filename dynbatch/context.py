"""Settings that hold within a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dynbatch.config import check_strategy, config
from dynbatch.graph import state


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
    before, config.autobatch = config.autobatch, strategy
    try:
        yield
    finally:
        config.autobatch = before


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
