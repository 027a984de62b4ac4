"""What scheduling costs a node on a graph of a million nodes, pass by pass: `python -m bench.scheduling`.

The graph is a thousand chains that mix at random, of four kinds of nodes. Times are the best of three, in nanoseconds a
node: `decode` reads the recorded stream; `choose` finds what is needed and its levels; `strategy` puts it in order;
these are scheduling proper. `arrange` orders rows by their consumers, `place` gives them room, and `tables` writes the
operand locations of every batch, which saves looking them up while batches run.
"""

from __future__ import annotations

import time

import numpy as np

import dynbatch as dy
from dynbatch.batching import execution, layout, run
from dynbatch.batching.pending import Pending

NODES, CHAINS, REPEATS = 1_000_000, 1000, 3
PASSES = ("decode", "choose", "strategy", "arrange", "place", "tables")


def record() -> dy.Expression:
    """A fresh graph; its last node."""
    dy.renew_cg()
    x = dy.inputVector([1.0, 2.0])
    ends = [dy.tanh(x) for _ in range(CHAINS)]
    for n in range(CHAINS, NODES):
        i = n % CHAINS
        a, b = ends[i], ends[(7 * i + 1) % CHAINS]
        ends[i] = dy.tanh(a) if n % 3 == 0 else a + b if n % 3 == 1 else dy.cmult(a, b)
    return dy.esum([dy.sum_elems(e) for e in ends])


def schedule(loss: dy.Expression, strategy: str) -> tuple[list[float], int]:
    """Seconds of each pass, and the number of batches."""
    x = run._execution(loss.graph)
    times = [time.perf_counter()]

    def lap() -> None:
        times.append(time.perf_counter())

    x._sync()
    lap()
    nodes, levels = x._choose(np.array([loss.vid]), join=True)  # all of them: nothing is left to join
    lap()
    pending = Pending(
        nodes, x.sig, x.level, levels, len(x.pools), x.lane_group, x.stream, x.layout, x.pos, x.producer, x.place
    )
    order, starts = execution.STRATEGIES[strategy](pending)
    lap()
    if strategy != "off":
        order = layout.arrange(pending, order, starts, x.chosen)
    lap()
    signatures = x.sig[order[starts[:-1]]]
    x._place(order, starts, signatures)
    lap()
    execution.Tables(x, order, starts, signatures)
    lap()
    return list(np.diff(times)), signatures.size


def main() -> None:
    """Print a line for each strategy."""
    print(f"{'ns a node':<10}" + "".join(f"{name:>10}" for name in PASSES) + f"{'batches':>12}")
    for strategy in execution.STRATEGIES:
        found = [schedule(record(), strategy) for _ in range(REPEATS)]
        best = np.min([times for times, _ in found], axis=0) / NODES * 1e9
        print(f"{strategy:<10}" + "".join(f"{t:>10.1f}" for t in best) + f"{found[0][1]:>12,}")


if __name__ == "__main__":
    main()
