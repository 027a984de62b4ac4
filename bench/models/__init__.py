"""The models that are compared: one module each. A model is added by adding its module to this folder.

A module has

- ``UNIT``: what an instance is called, in the plural.
- ``load(folder)``: the instances (a list of anything that pickle takes), and a dict of what the shapes of the weights
  depend on. ``folder`` is what ``--data`` names, or None for generated data.
- ``weights(hidden, sizes, random)``: the initial weights, a dict of float32 arrays drawn from a NumPy generator.
- ``flops(instance, hidden, sizes)``: floating-point operations of the products in its forward pass, a multiplication
  and an addition counting as two.
- ``PROGRAMS``: for each system of `bench.systems.SYSTEMS` that has the model, a function from the weights to a
  `Program`. The function imports its library, since a worker process must import no other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Program:
    """A model written for one system.

    Attributes:
        parameters: every parameter (or tensor) with its initial value, in the shape in which the user sees it.
        loss: from a minibatch, or from what ``prepare`` made of it, to the sum of its losses.
        prepare: work on the minibatch's structure that goes before the loss, such as making index tensors.
        collection: of the parameters, where the library has collections.
    """

    parameters: list[tuple[Any, Any]]
    loss: Callable[[Any], Any]
    prepare: Callable[[list], Any] | None = None
    collection: Any = None


def names() -> list[str]:
    """The models there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def without_cells(*objects: Any) -> None:
    """Make the cells of these objects the functions that they were, before the first call of any of them.

    Every op is then a node of its own.
    """
    from dynbatch.cell import Cell

    for x in objects:
        own = type(x)
        functions = {name: cell.function for name in dir(own) if isinstance(cell := getattr(own, name), Cell)}
        x.__class__ = type(own.__name__, (own,), functions)


def find(name: str) -> ModuleType:
    """The module of a model."""
    return importlib.import_module(f"{__name__}.{name}")
