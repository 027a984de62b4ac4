"""From what size on it pays to share out a fused kernel's rows over threads: ``python -m bench.splitting``.

The kernel is that of an LSTM's gates, on vectors of 64 and of 256. Both ways run in one process in turns; a line shows
medians of microseconds a batch, and the element operations (rows, times elements, times instructions) that
`dynbatch.cpu.team.SPLIT_FROM` is compared with.
"""

from __future__ import annotations

import statistics
from typing import Any

import dynbatch as dy
from dynbatch.cpu import tiers
from dynbatch.cpu.team import TEAM

WIDTHS = (64, 256)
ROWS = (4, 32, 64, 128, 256, 512)
REPEATS = 201
NEVER = 1 << 60
OPERATIONS = 11  # instructions of the kernel


@dy.cell
def gates(i: Any, f: Any, o: Any, u: Any, c: Any) -> Any:
    """What an LSTM does with its gates."""
    new = dy.cmult(dy.logistic(i), dy.tanh(u)) + dy.cmult(dy.logistic(f), c)
    return dy.cmult(dy.logistic(o), dy.tanh(new)), new


def seconds(rows: int, width: int, split_from: int) -> float:
    """Time of one batch."""
    TEAM.split_from(split_from)
    dy.renew_cg()
    inputs = [dy.inputVector([0.01 * r] * width) for r in range(rows)]
    dy.forward(inputs)
    made = [gates(*[inputs[(r + k) % rows] for k in range(5)]) for r in range(rows)]
    with dy.no_grad():
        made[-1][0].value()  # the others join
    return dy.plan().batch_reports[-1].seconds


def main() -> None:
    """Print a line for each size."""
    tiers.set_mode("always")
    print(f"{'width':>6}{'rows':>6}{'operations':>12}{'one thread':>12}{'shared out':>12}")
    for width in WIDTHS:
        for rows in ROWS:
            times: dict[int, list[float]] = {NEVER: [], 1: []}
            for _ in range(REPEATS):
                for split_from, found in times.items():
                    found.append(seconds(rows, width, split_from))
            one, several = (statistics.median(found) * 1e6 for found in times.values())
            print(f"{width:>6}{rows:>6}{rows * width * OPERATIONS:>12,}{one:>12.1f}{several:>12.1f}")


if __name__ == "__main__":
    main()
