"""What keeping or recomputing by cost is worth, against keeping all that backward reads: ``python -m bench.keep``.

Both ways run in one process and take turns minibatch by minibatch, so that what else the machine does hits both. One
line a model: medians of the training step's backward pass and of the whole step, and the peak memory of values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

import dynbatch as dy
from bench.models import treelstm
from dynbatch.compiler import ir
from dynbatch.compiler.keep import choose_kept
from dynbatch.cpu import code, tiers
from dynbatch.graph import state
from dynbatch.ops.shape import concatenate

HIDDEN = 256
BATCH = 64
MINIBATCHES = 12
REPEATS = 5  # the first of which compiles and is not counted

Policy = Callable[[ir.Program, Collection[int]], frozenset[int]]


def keep_what_is_read(program: ir.Program, read: Collection[int]) -> frozenset[int]:
    """All but views, and concatenations, which are gathered again."""
    values = program.values
    computed = [v for v in read if values[v].op is not None and values[v].domain == ir.ROW]
    return frozenset(v for v in computed if not (values[v].op.view or values[v].op is concatenate)) - set(  # type: ignore[union-attr]
        program.outputs
    )


POLICIES: dict[str, Policy] = {"keep": keep_what_is_read, "by cost": choose_kept}
_derived: dict[str, dict[ir.Program, dict[Any, Any]]] = {name: {} for name in POLICIES}


def use(policy: str) -> None:
    """Take a policy, with what it had Programs derive."""
    dy.renew_cg()
    code.choose_kept = POLICIES[policy]
    for program in ir._programs.values():
        program.cache = _derived[policy].setdefault(program, {})


def trees() -> tuple[dy.ParameterCollection, list[Callable[[], Any]]]:
    """The binary TreeLSTM on ListOps trees."""
    instances, sizes = treelstm.load(None)
    made = treelstm.PROGRAMS["dynbatch"](treelstm.weights(HIDDEN, sizes, np.random.default_rng(0)))
    for parameter, value in made.parameters:
        (parameter.init_from_array if parameter.is_lookup else parameter.set_value)(value)
    batches = [instances[BATCH * k : BATCH * (k + 1)] for k in range(MINIBATCHES)]
    return made.collection, [lambda batch=batch: made.loss(batch) for batch in batches]  # type: ignore[misc]


def blocks() -> tuple[dy.ParameterCollection, list[Callable[[], Any]]]:
    """Eight residual blocks: GELU, dropout and layer normalization between products."""
    collection = dy.ParameterCollection()
    layers = [
        [collection.add_parameters(s) for s in ((HIDDEN, HIDDEN), HIDDEN, (HIDDEN, HIDDEN), HIDDEN, HIDDEN)]
        for _ in range(8)
    ]

    def block(k: int) -> Any:
        w, b, u, gain, bias = layers[k]

        @dy.cell
        def run(x: Any) -> Any:
            inner = dy.dropout(dy.gelu(dy.affine_transform([b, w, x])), 0.1)
            return x + dy.layer_norm(u * inner, gain, bias)

        return run

    cells = [block(k) for k in range(len(layers))]
    inputs = np.random.default_rng(0).normal(size=(MINIBATCHES, 8 * BATCH, HIDDEN))

    def loss(batch: np.ndarray) -> Any:
        terms = []
        for row in batch:
            x = dy.inputTensor(row)
            for cell in cells:
                x = cell(x)
            terms.append(dy.squared_norm(x))
        return dy.esum(terms)

    return collection, [lambda batch=batch: loss(batch) for batch in inputs]  # type: ignore[misc]


def measure(name: str, make: Callable[[], tuple[dy.ParameterCollection, list[Callable[[], Any]]]]) -> None:
    """Print the line of one model."""
    dy.init(seed=1)
    collection, losses = make()
    trainer = dy.SimpleSGDTrainer(collection, 1e-4)
    seconds: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    peaks = dict.fromkeys(POLICIES, 0)
    for repeat in range(REPEATS):
        for loss in losses:
            for policy in POLICIES:
                use(policy)
                start = time.perf_counter()
                total = loss()
                total.value()
                middle = time.perf_counter()
                arena = state.graph.execution.arena
                arena.peak = 0
                total.backward()
                end = time.perf_counter()
                peaks[policy] = max(peaks[policy], arena.peak * arena.itemsize)
                trainer.update()
                if repeat:
                    seconds[policy].append((end - middle, end - start))
    for policy, found in seconds.items():
        backward, step = (1e3 * statistics.median(times) for times in zip(*found))
        memory = f"values {peaks[policy] / 2**20:6.1f} MiB"
        print(f"{name:8}{policy:10}backward {backward:7.1f} ms  both {step:7.1f} ms  {memory}")
    for which, index in (("backward", 0), ("both", 1)):
        ratios = [new[index] / old[index] for old, new in zip(*(seconds[p] for p in POLICIES))]
        print(f"{name:8}by cost / keep, {which}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    tiers.set_mode("always")
    measure("trees", trees)
    measure("blocks", blocks)
