"""What `dy.map` gains where values decide: `python -m bench.mapping`, or with hidden sizes behind it (64 and 256).

The model reads a sentence as a parser does: a score says whether the next word is shifted onto a stack, the two topmost
entries are joined, or the topmost is refined; after each action the next score is looked at. Sentences have 5 to 40
words, minibatches 64 sentences. A line for each way to run it, with sentences a second (median over the minibatches, in
inference and in training, forward, backward and update), and for the maps in inference the rounds of a minibatch and
the rows of a batch. `loop` calls the same function on one sentence after the other. `share` and `most` are arguments of
`map`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dynbatch as dy

BATCH, BATCHES, WORDS, ACTIONS = 64, 4, 1000, 3
Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

WAYS: dict[str, Each] = {
    "loop": lambda fn, sentences: [fn(s) for s in sentences],
    "map": dy.map,
    "map, share 0.75": lambda fn, sentences: dy.map(fn, sentences, share=0.75),
    "map, share 0.5": lambda fn, sentences: dy.map(fn, sentences, share=0.5),
    "map, share 0.25": lambda fn, sentences: dy.map(fn, sentences, share=0.25),
    "map, 32 at most": lambda fn, sentences: dy.map(fn, sentences, max_concurrent=32),
}


class Reader:
    """Shifts, joins and refines; labels are made up, so that training has a loss."""

    def __init__(self, hidden: int) -> None:
        self.collection = collection = dy.ParameterCollection()
        self.E = collection.add_lookup_parameters((WORDS, hidden))
        self.W, self.U, self.R = (collection.add_parameters((hidden, hidden)) for _ in range(3))
        self.V = collection.add_parameters((ACTIONS, hidden))
        self.trainer = dy.SimpleSGDTrainer(collection, learning_rate=1e-9)  # decisions stay those of a loop

    @dy.cell
    def shift(self, top: Any, word: int) -> Any:
        """A word onto the stack."""
        return dy.tanh(self.W * top + self.U * self.E[word])

    @dy.cell
    def join(self, left: Any, right: Any) -> Any:
        """Two entries become one."""
        return dy.tanh(self.U * left + self.W * right)

    @dy.cell
    def refine(self, top: Any) -> Any:
        """One entry, once more."""
        return dy.tanh(self.R * top)

    @dy.cell
    def scores(self, top: Any) -> Any:
        """Of the actions."""
        return self.V * top

    @dy.cell
    def loss(self, scores: Any, action: int) -> Any:
        """Of one action."""
        return dy.pickneglogsoftmax(scores, action)

    def read(self, sentence: list[int]) -> Any:
        """The loss of one sentence."""
        stack, losses = [self.E[sentence[0]]], []
        left, refined = sentence[:0:-1], False
        while left or len(stack) > 1:
            scores = self.scores(stack[-1])
            action = scores.argmax_value()
            losses.append(self.loss(scores, len(stack) % ACTIONS))
            if action == 1 and not refined:
                stack[-1], refined = self.refine(stack[-1]), True
            elif left and (action == 0 or len(stack) == 1):
                stack.append(self.shift(stack[-1], left.pop()))
                refined = False
            else:
                right = stack.pop()
                stack[-1] = self.join(stack[-1], right)
                refined = False
        return dy.esum(losses)


def run(model: Reader, each: Each, minibatch: list[list[int]], train: bool) -> float:
    """Loss of a minibatch, and in training an update."""
    dy.renew_cg()
    if not train:
        with dy.no_grad():
            return dy.esum(each(model.read, minibatch)).value()
    loss = dy.esum(each(model.read, minibatch))
    loss.backward()
    model.trainer.update()
    return loss.value()


def measure(model: Reader, each: Each, minibatches: list[list[list[int]]], train: bool) -> float:
    """Sentences a second, after a first round in which Programs are compiled."""
    times = []
    for number in range(4):
        for minibatch in minibatches:
            begin = time.perf_counter()
            run(model, each, minibatch, train)
            if number:
                times.append(time.perf_counter() - begin)
    return BATCH / statistics.median(times)


def main(sizes: list[int]) -> None:
    """Print a line for each way and hidden size."""
    rng = np.random.default_rng(0)
    minibatches = [
        [rng.integers(WORDS, size=rng.integers(5, 41)).tolist() for _ in range(BATCH)] for _ in range(BATCHES)
    ]
    print(f"{'hidden':>6}  {'':<16}{'inference':>10}{'training':>10}{'rounds':>8}{'rows a batch':>14}")
    for hidden in sizes:
        model = Reader(hidden)
        expected = run(model, WAYS["loop"], minibatches[0], train=False)
        for name, each in WAYS.items():
            assert abs(run(model, each, minibatches[0], train=False) / expected - 1) < 1e-3
            inference = measure(model, each, minibatches, train=False)
            plan = dy.plan("map")
            training = measure(model, each, minibatches, train=True)
            line = f"{hidden:>6}  {name:<16}{inference:>10.0f}{training:>10.0f}"
            print(line if name == "loop" else f"{line}{len(plan.rounds):>8}{plan.nodes / plan.batches:>14.1f}")


if __name__ == "__main__":
    dy.init(seed=1)
    main([int(size) for size in sys.argv[1:]] or [64, 256])
