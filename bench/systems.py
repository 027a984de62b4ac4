"""The systems that are compared: what one step on one minibatch is in each, and its phases.

A step of ``infer`` records (or prepares) a minibatch, runs it and reads the loss. A step of ``train`` goes on with the
backward pass and an update by SGD, without clipping and weight decay, of word vectors only those that occur. Libraries
are imported when a system is made, in the worker process that is its own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from bench.models import Program

PHASES = ("record", "schedule", "run", "backward", "update")
LEARNING_RATE = 0.05  # of the loss per instance; programs have the sum of the losses
clock = time.perf_counter


class MissingPeer(Exception):
    """The library of a system is not installed, or does not load here."""


class System:
    """A program in its library.

    Attributes:
        library: what is imported.
        peer: whether it is another project's, which need not be installed.
        strategies: of batching; None where there is nothing to choose.
    """

    library = ""
    peer = True
    strategies: ClassVar[tuple[str | None, ...]] = (None,)

    def __init__(self, program: Callable[[Any], Program], weights: Any, strategy: str | None, batch: int) -> None:
        self.rate = LEARNING_RATE / batch
        try:
            self.version = self.load(strategy)
        except ImportError as error:
            if not self.peer:
                raise
            raise MissingPeer(str(error)) from error
        self.program = program(weights)
        self.restore()

    def load(self, strategy: str | None) -> str:
        """Import the library, set up for ``strategy``; returns its version."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the parameters their initial values."""
        for parameter, value in self.program.parameters:
            self.assign(parameter, value)

    def assign(self, parameter: Any, value: np.ndarray) -> None:
        """Give one parameter a value."""
        raise NotImplementedError

    def infer(self, batch: list) -> tuple[float, dict[str, float]]:
        """The loss of a minibatch, and the seconds that each phase took."""
        raise NotImplementedError

    def train(self, batch: list) -> tuple[float, dict[str, float]]:
        """As `infer`, and then a backward pass and an update."""
        raise NotImplementedError

    def counts(self) -> dict[str, float]:
        """``nodes``, ``batches`` and ``bytes_gathered`` of the last forward pass, where the library tells."""
        return {}

    def blas(self) -> str | None:
        """The library of the matrix products; None where it is none of the known ones."""
        return None


class DynetStyle(System):
    """What DyNet and dynbatch have in common: the names of their interface."""

    def restore(self) -> None:
        """Also makes the trainer, once. Its update of word vectors is sparse unless told otherwise."""
        if not hasattr(self, "trainer"):
            self.trainer = self.dy.SimpleSGDTrainer(self.program.collection, learning_rate=self.rate)
            self.trainer.set_clip_threshold(0)
        super().restore()

    def assign(self, parameter: Any, value: np.ndarray) -> None:
        """Tables and dense parameters have different names for it."""
        (parameter.init_from_array if hasattr(parameter, "init_from_array") else parameter.set_value)(value)


class Dynbatch(DynetStyle):
    """This project. Its systems differ in the program."""

    library = "dynbatch"
    peer = False
    strategies: ClassVar = ("agenda", "depth", "off")

    def load(self, strategy: str | None) -> str:
        """The number of threads comes from the environment, as for all systems."""
        from importlib.metadata import PackageNotFoundError, version

        self.dy = importlib.import_module("dynbatch")
        self.dy.init(autobatch=strategy, seed=1)
        try:
            return version("dynbatch")
        except PackageNotFoundError:
            return "a checkout"

    def infer(self, batch: list) -> tuple[float, dict[str, float]]:
        """Scheduling and running are told apart by the plan."""
        dy = self.dy
        with dy.no_grad():
            begin = clock()
            dy.renew_cg()
            loss = self.program.loss(batch)
            recorded = clock()
            value = loss.value()
            end = clock()
        return value, self._forward_phases(recorded - begin) | {"total": end - begin}

    def train(self, batch: list) -> tuple[float, dict[str, float]]:
        """The backward plan's scheduling counts as backward."""
        dy = self.dy
        begin = clock()
        dy.renew_cg()
        loss = self.program.loss(batch)
        recorded = clock()
        value = loss.value()
        ran = clock()
        loss.backward()
        back = clock()
        self.trainer.update()
        end = clock()
        phases = self._forward_phases(recorded - begin)
        return value, phases | {"backward": back - ran, "update": end - back, "total": end - begin}

    def _plans(self) -> list[Any]:
        """Of the last forward pass: that of the loss, and before it the rounds of a map, if there was one."""
        return [self.dy.plan("map"), self.dy.plan()] if self.program.reads else [self.dy.plan()]

    def _forward_phases(self, recording: float) -> dict[str, float]:
        """Arguments: recording: seconds until the loss was recorded, in which rounds of a map have run."""
        plans = self._plans()
        ran = sum(plan.schedule_seconds + plan.run_seconds for plan in plans[:-1])
        schedule, run = sum(plan.schedule_seconds for plan in plans), sum(plan.run_seconds for plan in plans)
        return {"record": recording - ran, "schedule": schedule, "run": run}

    def counts(self) -> dict[str, float]:
        """From the plans."""
        names = ("nodes", "batches", "bytes_gathered")
        return {name: sum(getattr(plan, name) for plan in self._plans()) for name in names}

    def blas(self) -> str | None:
        """The library of the products that dynbatch leaves to one: MKL where it is in use, else what NumPy has."""
        from threadpoolctl import threadpool_info

        from dynbatch.cpu import products

        loaded = {pool["internal_api"] for pool in threadpool_info() if pool["user_api"] == "blas"}
        return "mkl" if products.mkl() else "openblas" if "openblas" in loaded else None


class Dynet(DynetStyle):
    """DyNet, from the package ``dyNET38``. Its products are Eigen's and run on one thread."""

    library = "dynet"
    strategies: ClassVar = ("agenda", "depth", "off")
    flags: ClassVar = {"off": 0, "agenda": 1, "depth": 2}  # dynet/exec.cc, BatchedExecutionEngine

    def load(self, strategy: str | None) -> str:
        """The strategy can only be set before the import; memory (MiB) grows where this is not enough."""
        import dynet_config

        dynet_config.set(mem=2048, autobatch=self.flags[strategy], random_seed=1)
        self.dy = importlib.import_module("dynet")
        return self.dy.__version__

    def assign(self, parameter: Any, value: np.ndarray) -> None:
        """A table of matrices takes them one by one, as vectors of their columns."""
        if value.ndim == 3:
            for index, matrix in enumerate(value):
                parameter.init_row(index, matrix.T.ravel().tolist())
        else:
            super().assign(parameter, value)

    def infer(self, batch: list) -> tuple[float, dict[str, float]]:
        """Scheduling is part of running: DyNet does not tell."""
        begin = clock()
        self.dy.renew_cg()
        loss = self.program.loss(batch)
        recorded = clock()
        value = loss.value()
        end = clock()
        return value, {"record": recorded - begin, "run": end - recorded, "total": end - begin}

    def train(self, batch: list) -> tuple[float, dict[str, float]]:
        """As `infer`, and then DyNet's backward pass and trainer."""
        begin = clock()
        self.dy.renew_cg()
        loss = self.program.loss(batch)
        recorded = clock()
        value = loss.value()
        ran = clock()
        loss.backward()
        back = clock()
        self.trainer.update()
        end = clock()
        phases = {"record": recorded - begin, "run": ran - recorded, "backward": back - ran, "update": end - back}
        return value, phases | {"total": end - begin}


class Torch(System):
    """PyTorch, eager."""

    library = "torch"

    def load(self, strategy: str | None) -> str:
        """Threads as the environment says: PyTorch reads OMP_NUM_THREADS itself."""
        self.torch = importlib.import_module("torch")
        return self.torch.__version__

    def assign(self, parameter: Any, value: np.ndarray) -> None:
        """A copy into the tensor."""
        with self.torch.no_grad():
            parameter.copy_(self.torch.from_numpy(np.array(value, order="C")))

    def infer(self, batch: list) -> tuple[float, dict[str, float]]:
        """Making index tensors counts as recording."""
        prepare = self.program.prepare
        with self.torch.inference_mode():
            begin = clock()
            prepared = prepare(batch) if prepare else batch
            recorded = clock()
            value = self.program.loss(prepared).item()
            end = clock()
        return value, self._phases(begin, recorded, run=end - recorded, total=end - begin)

    def train(self, batch: list) -> tuple[float, dict[str, float]]:
        """Autograd, and SGD as one call for all dense parameters and one for each sparse gradient."""
        torch, prepare = self.torch, self.program.prepare
        begin = clock()
        prepared = prepare(batch) if prepare else batch
        recorded = clock()
        loss = self.program.loss(prepared)
        value = loss.item()
        ran = clock()
        loss.backward()
        back = clock()
        with torch.no_grad():
            tensors = [tensor for tensor, _ in self.program.parameters if tensor.grad is not None]
            dense = [tensor for tensor in tensors if not tensor.grad.is_sparse]
            torch._foreach_add_(dense, [tensor.grad for tensor in dense], alpha=-self.rate)
            for tensor in tensors:
                if tensor.grad.is_sparse:  # not coalesced, which would take ten times as long as this
                    tensor.index_add_(0, tensor.grad._indices()[0], tensor.grad._values(), alpha=-self.rate)
                tensor.grad = None
        end = clock()
        return value, self._phases(
            begin, recorded, run=ran - recorded, backward=back - ran, update=end - back, total=end - begin
        )

    def _phases(self, begin: float, recorded: float, **phases: float) -> dict[str, float]:
        return phases | {"record": recorded - begin} if self.program.prepare else phases

    def blas(self) -> str | None:
        """What PyTorch was built with."""
        return "mkl" if self.torch.backends.mkl.is_available() else "openblas"


SYSTEMS: dict[str, type[System]] = {
    "dynbatch": Dynbatch,
    "dynbatch-static": Dynbatch,
    "dynbatch-plain": Dynbatch,
    "dynet": Dynet,
    "torch-by-hand": Torch,
    "torch-one-by-one": Torch,
}
