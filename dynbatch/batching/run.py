"""Running what is asked for: the entry points behind `Expression.value`, `backward` and `gradient`.

One plan runs at a time in a process: BLAS and the compiled kernels use the cores together, and their libraries are
not all safe to call from two threads at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.batching.execution import Execution, take_execution
from dynbatch.batching.plan import Plan
from dynbatch.batching.rounds import MapPlan
from dynbatch.errors import BackwardError, StaticError, user_line
from dynbatch.graph import Expression, Graph, check_live, state

if TYPE_CHECKING:
    from dynbatch.fibers import Wanted
    from dynbatch.types import Type

_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _execution(graph: Graph) -> Execution:
    if graph.tape:
        raise StaticError(
            f"{user_line()}: {graph.tape} reads a value while it is recorded; its structure may not depend on values"
        )
    if graph.execution is None:
        graph.execution = take_execution(graph)
    return graph.execution


def _let_others_go_on(graph: Graph, vids: list[int]) -> None:
    """In an instance of a map: return when a round has computed these values."""
    if state.fiber is not None:
        state.fiber.wait(_execution(graph), vids)


def run_round(wanted: Sequence[Wanted]) -> Plan:
    """Compute values that instances of a map wait for, and what those need; returns what ran.

    What will be read is copied for `values` to find, all of one type at once, since one by one that takes longer.
    """
    with _lock:
        execution = _execution(state.graph)
        execution.forward([v for vids, _ in wanted for v in vids], join=False)
        read: dict[Type, list[int]] = {}
        for vids, type in wanted:
            if type is not None:
                read.setdefault(type, []).extend(vids)
        for type, found in read.items():
            execution.fetch(found, type)
        return execution.last


def values(expression: Expression) -> np.ndarray:
    """The value of an expression in the user's shape; batch elements along an added last dimension."""
    check_live(expression)
    vids = expression.vids
    execution = _execution(expression.graph)
    if state.fiber is not None:
        state.fiber.wait(execution, vids, expression.type)
        if len(vids) == 1:
            found = execution.fetched.pop(vids[0], None)
            if found is not None:
                return found
    with _lock:
        execution.forward(vids)
        found = execution.read(vids, expression.type)
    return found[0] if len(vids) == 1 else np.ascontiguousarray(np.moveaxis(found, 0, -1))


def forward(expressions: list[Expression]) -> None:
    """Compute several expressions in one plan."""
    for e in expressions:
        check_live(e)
    if expressions:
        graph, vids = expressions[0].graph, [vid for e in expressions for vid in e.vids]
        _let_others_go_on(graph, vids)
        with _lock:
            _execution(graph).forward(vids)


def backward(expression: Expression, full: bool) -> None:
    """See `Expression.backward`."""
    check_live(expression)
    if expression.type.size != 1 or len(expression.vids) != 1:
        shape, batch = expression.dim()
        raise BackwardError(
            f"{user_line()}: backward() needs a scalar loss, not shape {shape}"
            + (f" with {batch} batch elements; sum_batches() makes it one" if batch > 1 else "")
        )
    _let_others_go_on(expression.graph, [expression.vid])
    with _lock:
        execution = _execution(expression.graph)
        execution.forward([expression.vid])
        execution.backward(expression.vid, full)


def gradient(expression: Expression) -> np.ndarray:
    """See `Expression.gradient`."""
    check_live(expression)
    with _lock:
        execution = _execution(expression.graph)
        found = [execution.gradient(vid, expression.type) for vid in expression.vids]
    return found[0] if len(found) == 1 else np.stack(found, axis=-1)


def plan(direction: str = "forward") -> Plan:
    """See `dynbatch.context.plan`."""
    if direction == "map":
        return state.last_map or MapPlan("none")
    if direction not in ("forward", "backward"):
        raise ValueError(f"plan: the direction is forward, backward or map, not {direction!r}")
    execution: Any = state.graph.execution
    if execution is None:
        return state.last_plans.get(direction) or Plan(direction, "none")
    return execution.last if direction == "forward" else execution.last_backward
