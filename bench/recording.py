"""What recording costs: `python -m bench.recording`, or with a folder that holds the treebank's `train.txt` behind it.

The TreeLSTM of `bench.models.treelstm` is recorded in minibatches of 64 trees and not run. A line for each way to write
it: in cells, op by op, and in cells under `@dy.static` with every tree seen before. The times are medians over the
minibatches, of the processor and not of the clock, and include walking the trees and summing the losses: nanoseconds a
node, microseconds an instance.
`DYNBATCH_PURE=1` in the environment measures the modules uncompiled.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

import dynbatch as dy
from bench.models import Program, treelstm
from dynbatch import compiled
from dynbatch.batching import run

BATCH, BATCHES, HIDDEN, REPEATS = 64, 24, 64, 5
WAYS = {"cells": "dynbatch", "ops": "dynbatch-plain", "replayed": "dynbatch-static"}


def measure(program: Program, minibatches: list[list[Any]]) -> tuple[float, float]:
    """Median seconds a node and an instance, after a first round in which signatures and tapes are made."""
    a_node, an_instance = [], []
    for number in range(1 + REPEATS):
        for minibatch in minibatches:
            dy.renew_cg()
            begin = time.thread_time()
            loss = program.loss(minibatch)
            taken = time.thread_time() - begin
            execution = run._execution(loss.graph)
            execution._sync()
            if number:
                a_node.append(taken / execution.nodes)
                an_instance.append(taken / len(minibatch))
    return statistics.median(a_node), statistics.median(an_instance)


def main(folder: str | None = None) -> None:
    """Print a line for each way."""
    instances, sizes = treelstm.load(folder)
    weights = treelstm.weights(HIDDEN, sizes, np.random.default_rng(0))
    minibatches = [instances[k : k + BATCH] for k in range(0, BATCH * BATCHES, BATCH)]
    print(f"{'compiled' if compiled.in_use else 'uncompiled':<12}{'ns a node':>12}{'us an instance':>18}")
    for name, system in WAYS.items():
        node, instance = measure(treelstm.PROGRAMS[system](weights), minibatches)
        print(f"{name:<12}{node * 1e9:>12.0f}{instance * 1e6:>18.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
