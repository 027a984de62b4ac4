"""Settings that hold within a ``with`` block, and looking at what ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynbatch.config import check_strategy
from dynbatch.graph import Expression, check_live, enter_phase, state

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


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A stage of a model, such as ``"encode"`` or ``"decode"``: all of it runs before the next one.

    Depth-based batching counts levels from the start of a phase, so that the first decoding steps of all instances run
    together however long their encodings took. Phases come in the order in which they are first entered; what is
    recorded outside belongs to the phase of what it uses.

    ```python
    for sentence in batch:
        with dy.phase("encode"):
            states = encoder.transduce(words(sentence))
        with dy.phase("decode"):
            losses.append(decode(states, sentence.target))
    ```

    Within a cell it does nothing: a cell is one node.
    """
    before, state.phase = state.phase, name
    if state.tracer is None:
        enter_phase(state.graph, name)
    try:
        yield
    finally:
        state.phase = before
        if state.tracer is None:
            enter_phase(state.graph, before)


def align(expression: Expression, skipped: int = 1) -> Expression:
    """Say that this expression skipped operations that other instances have, and return it.

    Depth-based batching then counts what follows as that much deeper, so that it runs together with the same
    operations of the instances that took the longer branch. Nothing is computed.

    ```python
    h = refine(h) if needs_refining(token) else dy.align(h)
    ```

    Arguments:
        expression: the end of the shorter branch.
        skipped: how many operations (nodes in a row) the longer branch has more.
    """
    if skipped < 0:
        raise ValueError(f"align: the number of skipped operations must not be negative, not {skipped}")
    if state.tracer is None:
        check_live(expression)
        for vid in expression.vids:
            state.graph.skips.extend((vid, skipped))
    return expression


def forward(expressions: list[Expression]) -> None:
    """Compute several expressions in one plan, before their values are asked for one by one."""
    from dynbatch.batching.run import forward

    forward(expressions)


def plan(direction: str = "forward") -> Plan:
    """What the last plan of this thread did: nodes, batches, rows, bytes gathered, times; print it for a table.

    Arguments:
        direction: ``"forward"``, or ``"backward"`` for the last backward plan, or ``"map"`` for all that the last
            `map` ran, round by round; that is also the last forward plan when a map has just ended.
    """
    from dynbatch.batching.run import plan

    return plan(direction)
