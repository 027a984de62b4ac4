"""Models whose control flow depends on values, run in every way there is: what comes out must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import dynbatch as dy
from models import training


def looped(fn: Callable[[Any], Any], instances: Iterable[Any]) -> list[Any]:
    """What `dy.map` is to be equal to: one instance after the other."""
    found = []
    for i, instance in enumerate(instances):
        with dy.stream(i):
            found.append(fn(instance))
    return found


def made(task_class: type[training.Task], flags: str, train: list) -> Any:
    """A model with fresh parameters."""
    args = training.parse(task_class, flags.split())
    return task_class(dy.ParameterCollection(), args, task_class.vocabulary(args, train))


def outcome(task: training.Task, losses: Callable[[], list[Any]]) -> list[np.ndarray]:
    """The loss of a fresh graph, and the gradients of all parameters."""
    dy.renew_cg()
    loss = dy.esum(losses())
    loss.backward()
    collection = task.collection
    parameters = (*collection.parameters_list(), *collection.lookup_parameters_list())
    found = [loss.npvalue(), *(p.grad_as_array() for p in parameters)]
    collection.reset_gradient()
    return found


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Up to the rounding of double precision."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
