"""The models that are compared: one module each. A model is added by adding its module to this folder.

A module has

- ``UNIT``: what an instance is called, in the plural.
- ``load(folder)``: the instances (a list of anything that pickle takes), and a dict of what the shapes of the weights
  depend on. ``folder`` is what ``--data`` names, or None for generated data.
- ``weights(hidden, sizes, random)``: the initial weights, a dict of float32 arrays drawn from a NumPy generator.
- ``flops(instance, hidden, sizes)``: floating-point operations of the products in its forward pass, a multiplication
  and an addition counting as two.
- ``MODES``, where not both ``infer`` and ``train`` are timed. A model that decides by what it computes may decide
  otherwise in another system once rounding has gone through some updates.
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
        remember: called before anything is timed, with the instances that no minibatch had yet, where a program replays
            what it has recorded.
        reads: whether the loss depends on values that are read while it is recorded, so that parts of it have run.
    """

    parameters: list[tuple[Any, Any]]
    loss: Callable[[Any], Any]
    prepare: Callable[[list], Any] | None = None
    collection: Any = None
    remember: Callable[[list], None] | None = None
    reads: bool = False


def recording(parameters: list[tuple[Any, Any]], instance_loss: Callable[[Any], Any], collection: Any) -> Program:
    """The program of ``dynbatch`` and ``dynbatch-plain``: every minibatch is recorded anew.

    Arguments:
        instance_loss: from an instance to its loss, under dynbatch.
    """
    import dynbatch as dy

    return Program(
        parameters, lambda batch: dy.esum([instance_loss(instance) for instance in batch]), collection=collection
    )


def replaying(parameters: list[tuple[Any, Any]], instance_loss: Callable[[Any], Any], collection: Any) -> Program:
    """The program of ``dynbatch-static``: what one instance records is recorded once, and replayed from then on.

    This is what an epoch costs from the second one on. Timed minibatches are new mixtures of instances whose tapes were
    recorded before; what recording a minibatch's tapes took is reported apart.

    Arguments:
        instance_loss: from an instance to its loss, under dynbatch.
    """
    import dynbatch as dy

    static_loss = dy.static(instance_loss, maxsize=1_000_000)

    def loss(batch: list) -> Any:
        return dy.esum([static_loss(instance) for instance in batch])

    def remember(instances: list) -> None:
        for number, instance in enumerate(instances):
            if number % 64 == 0:
                dy.renew_cg()
            static_loss(instance)
        dy.renew_cg()

    return Program(parameters, loss, collection=collection, remember=remember)


def mapped(parameters: list[tuple[Any, Any]], instance_loss: Callable[[Any], Any], collection: Any) -> Program:
    """The program of ``dynbatch`` and ``dynbatch-plain`` where values decide what is computed.

    Arguments:
        instance_loss: from an instance to its loss, under dynbatch; may read values.
    """
    import dynbatch as dy

    return Program(parameters, lambda batch: dy.esum(dy.map(instance_loss, batch)), collection=collection, reads=True)


Build = Callable[..., tuple[list[tuple[Any, Any]], Callable[[Any], Any], Any]]
"""From the weights, and whether the model's cells are to be cells (``cells``), to what `recording` takes."""


def own_programs(build: Build) -> dict[str, Callable[[Any], Program]]:
    """The programs of dynbatch's systems: a model of `models` in cells, recorded and replayed, and plain, op by op."""
    return {
        "dynbatch": lambda weights: recording(*build(weights, cells=True)),
        "dynbatch-static": lambda weights: replaying(*build(weights, cells=True)),
        "dynbatch-plain": lambda weights: recording(*build(weights, cells=False)),
    }


def own_mapped_programs(build: Build) -> dict[str, Callable[[Any], Program]]:
    """The same of a model that reads values, under ``dy.map``; nothing of it can be replayed."""
    return {
        "dynbatch": lambda weights: mapped(*build(weights, cells=True)),
        "dynbatch-plain": lambda weights: mapped(*build(weights, cells=False)),
    }


def with_weights(task: Any, weights: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The parameters of a task of `models` with their values; those whose names do not end in _s are its encoder's."""
    owners = {name: task if name.endswith("_s") else task.encoder for name in weights}
    return [(getattr(owners[name], name), value) for name, value in weights.items()]


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
