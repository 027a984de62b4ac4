"""Records random programs and prints what came of each: `python -m tests.recorded_programs COUNT`.

`tests/test_recording.py` compares what the compiled modules print with what the same modules print in Python. Programs
use operations of each kind, cells, lists, payload, manual batches, phases, static functions and parameters; some steps
are wrong, and their errors are part of what is printed.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from typing import Any

import numpy as np

import dynbatch as dy
from dynbatch import functions
from dynbatch.graph import state

SIZE = 3


class Model:
    """Parameters, and cells that take every kind of argument."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.W, self.U = (self.pc.add_parameters((SIZE, SIZE), name=name) for name in "WU")
        self.b = self.pc.add_parameters(SIZE, name="b")
        self.words = self.pc.add_lookup_parameters((5, SIZE), name="words")
        self.scale = 2.0
        self.flags = [True, False]

    @dy.cell
    def step(self, x: Any, y: Any) -> Any:
        h = dy.tanh(dy.affine_transform([self.b, self.W, x, self.U, y]))
        return h, h * self.scale

    @dy.cell
    def gather(self, xs: Any, ys: Any, rate: float) -> Any:
        return dy.esum([dy.cmult(x, y) for x, y in zip(xs, ys)]) * rate

    @dy.cell
    def leaf(self, word: int) -> Any:
        x = self.words[word]
        return dy.logistic(x) if self.flags[0] else x

    @dy.cell
    def drop(self, x: Any, label: int) -> Any:
        return dy.pickneglogsoftmax(dy.dropout(x, 0.5), label)

    @dy.static
    def chain(self, x: Any, length: int) -> Any:
        for _ in range(length):
            x = dy.dropout(dy.tanh(self.W * x + self.b), 0.1)
        return x, dy.inputVector([1.0, 2.0, 3.0])


def steps(rng: random.Random, model: Model, xs: list[Any]) -> list[Any]:
    """Things that a program can do, as functions that return an expression, expressions, or nothing."""

    def x() -> Any:
        return rng.choice(xs)

    def number() -> Any:
        return rng.choice([2, -0.5, np.float32(3), True, float("nan"), 10**40, "2", None])

    def index() -> Any:
        return rng.choice([0, 1, 2, -1, 4, -9, True, np.int64(1), 1.0, 1 << 70])

    def some(least: int = 0) -> list[Any]:
        return [x() for _ in range(rng.randint(least, 4))]

    def change() -> None:
        name, value = rng.choice(
            [
                ("scale", rng.choice([2.0, 2, 3.0])),
                ("W", rng.choice([model.W, model.U])),
                ("flags", [rng.random() < 0.5]),
            ]
        )
        setattr(model, name, value)

    def phase() -> Any:
        with dy.phase(rng.choice(["encode", "decode"])):
            return dy.tanh(x())

    return [
        lambda: dy.inputVector([rng.random() for _ in range(SIZE)]),
        lambda: dy.inputTensor(np.ones((SIZE, 2)), batched=True),
        lambda: model.words[index()],
        lambda: dy.lookup(model.words, index(), update=False),
        lambda: dy.lookup_batch(model.words, [index(), 1]),
        lambda: rng.choice([dy.tanh, dy.exp, dy.nobackprop, dy.logistic, dy.abs])(rng.choice([x(), model.b])),
        lambda: rng.choice([dy.cmult, dy.bmax, dy.cdiv])(x(), rng.choice([x(), model.b, number()])),
        lambda: rng.choice([model.b, x()]) + rng.choice([x(), number()]),
        lambda: number() - x(),
        lambda: x() * number(),
        lambda: number() * x(),
        lambda: x() / rng.choice([x(), number()]),
        lambda: -x(),
        lambda: rng.choice([model.W, model.U, x()]) * rng.choice([x(), model.b]),
        lambda: model.W @ x(),
        lambda: dy.affine_transform([model.b, model.W, x(), model.U, x()]),
        lambda: dy.affine_transform([x(), model.W, x()]),
        lambda: dy.affine_transform([model.b, x()]),
        lambda: dy.affine_transform([model.b, model.W, model.b]),
        lambda: rng.choice([dy.esum, dy.average, dy.emax, dy.logsumexp])(some()),
        lambda: dy.concatenate([x(), x()]),
        lambda: dy.pickneglogsoftmax(x(), index()),
        lambda: x()[index()],
        lambda: dy.dropout(x(), 0.5),
        lambda: dy.zeros(SIZE),
        lambda: model.step(x(), x()),
        lambda: model.step(x(), y=x()),
        lambda: model.step(x()),
        lambda: model.leaf(index()),
        lambda: model.drop(x(), index()),
        lambda: model.gather(some(), some(), number()),
        lambda: model.gather(found := some(1), found, 0.5),
        lambda: model.chain(x(), rng.randint(0, 3)),
        lambda: dy.align(x(), 2),
        lambda: dy.pick_batch_elem(x(), 0),
        phase,
        change,
    ]


def program(seed: int) -> dict[str, Any]:
    """Record one program; all that its graph holds, and its errors."""
    rng = random.Random(seed)
    dy.renew_cg()
    model, xs, errors = Model(), [], []
    xs += [dy.inputVector([0.1, 0.2, 0.3]) for _ in range(2)]
    stale = xs[0]
    if seed % 5 == 0:
        dy.renew_cg()
        xs = [dy.inputVector([1.0, 2.0, 3.0]), stale]
    for _ in range(60):
        step = rng.choice(steps(rng, model, xs))
        try:
            made = step()
        except (dy.DynbatchError, TypeError, ValueError, OverflowError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        xs += [e for e in (made if isinstance(made, tuple) else (made,)) if e is not None and e.dim()[0] == (SIZE,)]
    graph = state.graph
    names = ("floats", "data", "lanes", "phase_marks", "skips")
    held = {name: getattr(graph, name).tolist() for name in names}
    signatures = [(repr(s.program), [p.name for p in s.binding], s.tail, s.bounds) for s in graph.signatures]
    return held | {
        "stream": graph.stream.tolist(),
        "values": graph.values,
        "handles": [(list(e.vids), repr(e.type)) for e in xs],
        "signatures": signatures,
        "errors": errors,
    }


def interface() -> dict[str, Any]:
    """Signature and docstring of every function and of an expression's methods."""
    named = {name: getattr(functions, name) for name in functions.__all__}
    named |= {name: f for name, f in vars(dy.Expression).items() if inspect.isroutine(f) and not name.startswith("_")}
    return {name: (str(inspect.signature(f)), inspect.getdoc(f)) for name, f in named.items()}


if __name__ == "__main__":
    dy.init(seed=3)
    json.dump([interface(), *[program(seed) for seed in range(int(sys.argv[1]))]], sys.stdout)
