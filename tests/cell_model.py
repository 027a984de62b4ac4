"""What the tests of cells share: a model with one of each kind of cell, and small helpers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import dynbatch as dy

STRATEGIES = ["off", "depth", "agenda"]


def vector(*numbers: float) -> Any:
    return dy.inputVector(numbers or (0.5, -1.0, 2.0))


def here(offset: int = 0) -> str:
    """``file:line`` of the caller, as errors name it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}"


def batches(expressions: list[Any], strategy: str = "agenda") -> int:
    """How many batches compute these, all of the graph being new."""
    with dy.autobatch(strategy):
        dy.forward(expressions)
    return dy.plan().batches


class Model:
    """A bit of everything: parameters, a table, a flag, a list of layers."""

    def __init__(self, size: int = 3) -> None:
        self.pc = dy.ParameterCollection()
        self.W = self.pc.add_parameters((size, size))
        self.U = self.pc.add_parameters((size, size))
        self.b = self.pc.add_parameters(size)
        self.words = self.pc.add_lookup_parameters((7, size))
        self.layers = [self.pc.add_parameters((size, size)) for _ in range(2)]
        self.gated = True
        self.factor = 2.0

    @dy.cell
    def step(self, x: Any, h: Any) -> Any:
        return dy.tanh(dy.affine_transform([self.b, self.W, x, self.U, h]))

    @dy.cell
    def pair(self, x: Any, h: Any) -> Any:
        gate = dy.logistic(self.W * x + self.b)
        c = dy.cmult(gate, h)
        return dy.tanh(c), c

    @dy.cell
    def child_sum(self, x: Any, children: list[Any]) -> Any:
        if not children:
            return dy.tanh(self.W * x)
        total = dy.esum(children)
        kept = dy.esum([dy.cmult(dy.logistic(self.U * c + self.b), c) for c in children])
        return dy.tanh(self.W * x + self.U * total) + kept

    @dy.cell
    def loss(self, h: Any, label: int, weight: float) -> Any:
        return dy.pickneglogsoftmax(self.U * h + self.b, label) * weight

    @dy.cell
    def embed(self, word: int) -> Any:
        return dy.tanh(self.words[word])

    @dy.cell
    def switched(self, x: Any) -> Any:
        h = self.W * x
        for layer in self.layers:
            h = dy.tanh(layer * h)
        return dy.logistic(h) * self.factor if self.gated else h * self.factor


def gradients(model: Model) -> list[np.ndarray]:
    parameters = [*model.pc.parameters_list(), *model.pc.lookup_parameters_list()]
    return [p.grad_as_array() for p in parameters]
