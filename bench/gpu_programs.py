"""Programs whose values and gradients must be the same on every device, for `bench.gpu_check`.

Each case is run on the CPU, in the NumPy tier, and on the device, from the same seed; the arrays that it returns are
compared by name. Ops come from the tests' table of all public ops, random cells from the tests' scripts without what
has kinks: where two candidates are equal but for rounding, gradients may differ rightly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import dynbatch as dy
from bench import models
from dynbatch.batching import backends, execution
from dynbatch.config import Config, config
from dynbatch.cpu import tiers
from dynbatch.cuda.representative import Cells

Arrays = dict[str, np.ndarray]

TOLERANCE = {"float32": 3e-4, "float64": 1e-9}
"""Largest difference, as a part of the array's largest element or of 1."""

INSTANCES = 5  # of an op, a cell or a script in one graph
TRAINERS = ("SimpleSGD", "MomentumSGD", "Adagrad", "RMSProp", "Adam", "AMSGrad")
KINKS = {"rectify", "abs", "bmax", "emax", "max_dim"}
PRODUCTS = ("cublas", "gather")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: for messages.
        run: gives the arrays; called once on each device.
        dtype: of all values.
        product: ``DYNBATCH_CUDA_PRODUCT`` meanwhile.
        like_dynet: whether the device does without everything that DyNet does not have.
    """

    name: str
    run: Callable[[], Arrays]
    dtype: str = "float64"
    product: str = "auto"
    like_dynet: bool = False

    def __str__(self) -> str:
        product = f" by {self.product}" if self.product != "auto" else ""
        return f"{self.name} {self.dtype}{product}{' like DyNet' if self.like_dynet else ''}"

    def differences(self, device: str) -> list[str]:
        """What is not the same on the device and on the CPU; one line each."""
        fresh("cpu", self.dtype)
        wanted = self.run()
        fresh(device, self.dtype)
        os.environ["DYNBATCH_CUDA_PRODUCT"] = self.product
        try:
            with like_dynet() if self.like_dynet else ordinary():
                found = self.run()
        finally:
            del os.environ["DYNBATCH_CUDA_PRODUCT"]
        lines = [(name, difference(wanted[name], found[name], TOLERANCE[self.dtype])) for name in wanted]
        return [f"{self}: {name} {text}" for name, text in lines if text]


def difference(wanted: np.ndarray, found: np.ndarray, tolerance: float) -> str:
    """How two arrays differ; empty where they do not."""
    if wanted.shape != found.shape:
        return f"has shape {found.shape}, not {wanted.shape}"
    finite = np.isfinite(wanted)
    wrong = ~np.where(finite, np.isfinite(found), (found == wanted) | (np.isnan(found) & np.isnan(wanted)))
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        return f"is {found[*at]} at {at}, not {wanted[*at]} ({wrong.sum()} of {wrong.size} elements)"
    if not finite.any():
        return ""
    distance = np.abs(found[finite] - wanted[finite])
    scale = max(1.0, float(np.abs(wanted[finite]).max()))
    if distance.max() <= tolerance * scale:
        return ""
    many = int((distance > tolerance * scale).sum())
    return f"differs by {distance.max():.1e} where the largest is {scale:.1e} ({many} of {wanted.size} elements)"


def fresh(device: str, dtype: str) -> None:
    """Settings as at the start of a process, and an empty graph: dtype and seed could not be chosen again otherwise."""
    dy.renew_cg()
    vars(config).update(vars(Config()))
    dy.init(device=device, dtype=dtype, seed=1)
    tiers.set_mode("never")


@contextmanager
def ordinary() -> Iterator[None]:
    """Nothing special."""
    yield


@contextmanager
def like_dynet() -> Iterator[None]:
    """On the device in use: a kernel an instruction, operands gathered by copies, rows as the strategy orders them."""
    backend, arrange = backends.backend(), execution.arrange
    backend.like_dynet = True
    execution.arrange = lambda pending, order, starts, placed: order  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.like_dynet = False
        execution.arrange = arrange


# ---- programs --------------------------------------------------------------------------------------------------------


def asked(results: list[tuple[str, Any]], inputs: list[Any], parameters: list[Any]) -> Arrays:
    """Values of results, and gradients of a loss that depends on each of their elements in its own way."""
    rng = np.random.default_rng(7)
    losses = [dy.sum_elems(dy.cmult(r, dy.inputTensor(rng.normal(size=r.dim()[0])))) for _, r in results]
    dy.esum(losses).backward(full=True)
    found = {name: r.npvalue() for name, r in results}
    found |= {f"gradient of input {k}": x.gradient() for k, x in enumerate(inputs)}
    return found | {f"gradient of {p.name}": p.grad_as_array() for p in parameters}


def op(row: Any, variant: Any) -> Arrays:
    """An op on rows of batches, in another order than theirs; the first operand is one of all."""
    rng = np.random.default_rng(list(f"{row}-{variant}".encode()))
    instances = [row.draw(rng, variant) for _ in range(INSTANCES)]
    bases = [[dy.inputTensor(a / 2) for a in instance.arrays] for instance in instances]
    operands = [[base * 2.0 for base in given] for given in bases]
    results = []
    for k in (3, 0, 4, 2, 1):
        given = operands[k] if k % 2 else [*operands[0][:1], *operands[k][1:]]
        results.append((f"value {k}", row.build(given, instances[k].payload, variant.static)))
    return asked(results, [base for given in bases for base in given], [])


def cells(size: int) -> Arrays:
    """The kinds of cells that models are made of."""
    model, rng = Cells(size), np.random.default_rng(3)
    inputs = [dy.inputTensor(rng.normal(size=size)) for _ in range(8)]
    matrices = [dy.inputTensor(rng.normal(size=(size, 3))) for _ in range(2)]
    vectors = [dy.tanh(x) for x in inputs]
    results: list[tuple[str, Any]] = []

    def some(count: int) -> list[Any]:
        return [vectors[k] for k in rng.permutation(len(vectors))[:count]]

    for k in range(INSTANCES):
        x, y, matrix = *some(2), matrices[k % 2]
        h_l, c_l, h_r, c_r = some(4)
        outputs = {
            "leaf": model.leaf(k % 5),
            "compose": model.compose(h_l, c_l, h_r, c_r),
            "child_sum": model.child_sum(x, some(1 + k % 3), some(1 + k % 3)),
            "pool": model.pool(some(1 + k)),
            "attend": model.attend(x, matrix),
            "attend_to_columns": model.attend_to_columns(matrix, x),
            "residual": model.residual(x),
            "draw": model.draw(x),
            "loss": model.loss(x, k % size, 0.5),
            "margin": model.margin(x, k % size),
            "activations": model.activations(x, y),
        }
        for builder in model.builders:
            outputs[type(builder).__name__] = builder.initial_state().transduce(some(1 + k))[-1]
        for name, output in outputs.items():
            parts = output if isinstance(output, tuple) else (output,)
            results += [(f"{name} {k}.{i}", part) for i, part in enumerate(parts)]
    return asked(results, [*inputs, *matrices], list(model.pc.named_parameters().values()))


class Trained:
    """One of the benchmark's models with small weights, and minibatches.

    Arguments:
        model, system: as in `bench.models`.
    """

    def __init__(self, model: str, system: str, hidden: int, batch: int) -> None:
        module = models.find(model)
        instances, sizes = module.load(None)
        weights = module.weights(hidden, sizes, np.random.default_rng(2))
        self.program = module.PROGRAMS[system](weights)
        for parameter, value in self.program.parameters:
            (parameter.init_from_array if hasattr(parameter, "init_from_array") else parameter.set_value)(value)
        self.instances, self.batch = instances, batch

    def loss(self, number: int) -> Any:
        """Of a minibatch, in a new graph."""
        dy.renew_cg()
        return self.program.loss(self.instances[number * self.batch : (number + 1) * self.batch])


def model(name: str, system: str, hidden: int, batch: int, strategy: str = "agenda") -> Arrays:
    """Losses and gradients of two minibatches, summed."""
    trained, found = Trained(name, system, hidden, batch), {}
    with dy.autobatch(strategy):
        for k in range(2):
            loss = trained.loss(k)
            found[f"loss {k}"] = loss.npvalue() / batch
            loss.backward()
    named = trained.program.collection.named_parameters()
    return found | {f"gradient of {name}": p.grad_as_array() / batch for name, p in named.items()}


def training(trainer: str, decay: float, sparse: bool) -> Arrays:
    """Losses and parameters of some steps of a trainer, with clipping."""
    trained, found = Trained("treelstm", "dynbatch", 12, 4), {}
    collection = trained.program.collection
    collection.set_weight_decay_lambda(decay)
    rule = getattr(dy, f"{trainer}Trainer")(collection)
    rule.set_sparse_updates(sparse)
    rule.set_clip_threshold(0.5)
    for k in range(3):
        loss = trained.loss(k)
        found[f"loss {k}"] = loss.npvalue()
        loss.backward()
        rule.update()
    return found | {name: p.as_array() for name, p in collection.named_parameters().items()}


def captured() -> Arrays:
    """A plan that repeats, as a graph: with other values given by the user, and other parameters, on the way."""
    found = {}
    cells_ = Cells(20)
    for k in range(6):
        if k == 4:
            cells_.W.scale(1.5)
        with dy.no_grad():
            dy.renew_cg()
            x = dy.inputTensor(np.linspace(-1, 1, 20) + 0.1 * k)
            states = [cells_.leaf(word) for word in (1, 2, 3)]
            h, _ = cells_.child_sum(x, [h for h, _ in states], [c for _, c in states])
            found[f"value {k}"] = dy.concatenate([h, cells_.pool([h, x])]).npvalue()
    return found


def script(seed: int, as_cell: bool) -> Arrays:
    """A random function of several operands and a list, as a cell or op by op."""
    from tests import random_cells

    rng = np.random.default_rng(seed)
    names = [name for name in random_cells.NAMES if name not in KINKS]

    def steps(most: int) -> list[Any]:
        return [(str(rng.choice(names)), *rng.integers(0, 41, size=3).tolist()) for _ in range(rng.integers(1, most))]

    drawn = {
        "steps": steps(12), "children": steps(5), "reduce": str(rng.choice(["esum", "average", "logsumexp"])),
        "outputs": rng.integers(0, 21, size=2).tolist(),
    }  # fmt: skip
    pc = dy.ParameterCollection()
    dense = {
        name: pc.add_parameters(shape, init=rng.normal(size=shape) * 0.7, name=name)
        for name, shape in random_cells.PARAMETERS.items()
    }
    function = random_cells.function(drawn, dense)
    call = dy.cell(function) if as_cell else function
    inputs, results = [], []
    for k in range(INSTANCES):
        shapes = [random_cells.V, random_cells.V, random_cells.M, *[random_cells.V] * (1 + k % 3)]
        xs = [dy.inputTensor(rng.normal(size=shape)) for shape in shapes]
        outputs = call(xs[0], xs[1], xs[2], xs[3:], int(rng.integers(3)), float(rng.normal()))
        inputs += xs
        results += [(f"output {k}.{i}", dy.tanh(o * 0.3)) for i, o in enumerate(outputs)]
    return asked(results, inputs, list(dense.values()))


# ---- cases -----------------------------------------------------------------------------------------------------------


def cases(smoke: bool) -> Iterator[Case]:
    """All cases, those first that say most; random ones without end.

    Arguments:
        smoke: a few small ones.
    """
    from tests.ops.op_table import ROWS

    def of_model(
        name: str, system: str = "dynbatch", strategy: str = "agenda", batch: int = 6, hidden: int = 20
    ) -> Any:
        label = f"{name} {system} {strategy} batch {batch}"
        return label, lambda: model(name, system, hidden, batch, strategy)

    dtypes = ("float32",) if smoke else ("float32", "float64")
    for dtype in dtypes:
        for name in ("treelstm",) if smoke else ("treelstm", "birnn"):
            yield Case(*of_model(name), dtype)
        yield (
            Case("cells of size 6", lambda: cells(6), dtype)
            if smoke
            else Case("cells of size 37", lambda: cells(37), dtype)
        )
        yield Case("a captured plan", captured, dtype)
        yield Case(*of_model("treelstm", "dynbatch-plain", batch=3), dtype, like_dynet=True)
    for product in PRODUCTS:
        for dtype in dtypes:
            yield Case(*of_model("treelstm", batch=6 if smoke else 160), dtype, product)
    for k, trainer in enumerate(TRAINERS[: 2 if smoke else None]):
        yield Case(f"{trainer} trainer", lambda t=trainer, k=k: training(t, 0.01 * (k % 2), k % 3 > 0))  # type: ignore[misc]
    rows = [row for row in ROWS if row.name in ("times", "softmax", "pick")] if smoke else ROWS
    for dtype in dtypes:
        for row in rows:
            yield Case(f"op {row} {row.variants[0]}", lambda r=row: op(r, r.variants[0]), dtype)  # type: ignore[misc]
    for seed in range(1 if smoke else 12):
        yield Case(f"script {seed} as a cell", lambda s=seed: script(s, True))  # type: ignore[misc]
    if smoke:
        return
    for dtype in dtypes:
        yield Case("cells of size 256", lambda: cells(256), dtype)
    for strategy in ("depth", "off"):
        yield Case(*of_model("treelstm", strategy=strategy))
    yield Case(*of_model("birnn", "dynbatch-plain", batch=3), like_dynet=True)
    yield Case(*of_model("birnn", "dynbatch-static"))
    for row in rows:
        for variant in row.variants[1:]:
            yield Case(f"op {row} {variant}", lambda r=row, v=variant: op(r, v))  # type: ignore[misc]
    for seed in range(12, 10_000):
        yield Case(f"script {seed}", lambda s=seed: script(s, bool(s % 2)))  # type: ignore[misc]
