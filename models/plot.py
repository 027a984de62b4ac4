"""The loss curve, as a PNG and drawn in the terminal with Unicode braille dots."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

Curve = list[tuple[float, float]]
"""Points (x, y); x grows."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of U+2800's dots by row (from the top) and column."""


def smoothed(curve: Curve, parts: int) -> Curve:
    """At most `parts` points, each the mean of a run of neighbours."""
    bounds = [round(k * len(curve) / parts) for k in range(parts + 1)]
    runs = [curve[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def drawn(curve: Curve, xlabel: str, ylabel: str, width: int = 72, height: int = 12) -> str:
    """The curve as lines of text, y on a logarithmic scale.

    Arguments:
        curve: at least one point; every y above 0.
        xlabel, ylabel: what the axes show.
        width, height: of the plot in characters, each of which has 2 by 4 dots; the axes come on top.
    """
    points = smoothed(curve, width * 2)
    xs, ys = [x for x, _ in points], [math.log(y) for _, y in points]
    low, high = min(ys), max(ys)
    columns = [round((x - xs[0]) / ((xs[-1] - xs[0]) or 1) * (width * 2 - 1)) for x in xs]
    rows = [round((high - y) / ((high - low) or 1) * (height * 4 - 1)) for y in ys]

    cells = [[0x2800] * width for _ in range(height)]
    for k, (column, row) in enumerate(zip(columns, rows)):
        next_column, next_row = (columns[k + 1], rows[k + 1]) if k + 1 < len(rows) else (column + 1, row)
        for x in range(column, max(next_column, column + 1)):  # a line to the next point, one column of dots at a time
            share = (x - column) / max(next_column - column, 1)
            step = (x + 1 - column) / max(next_column - column, 1)
            ends = sorted((round(row + share * (next_row - row)), round(row + step * (next_row - row))))
            for y in range(ends[0], max(ends[1], ends[0] + 1)):
                cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    ticks = {row: f"{math.exp(high - (high - low) * row / (height - 1)):.3g}" for row in {0, height // 2, height - 1}}
    margin = max(len(text) for text in ticks.values())
    lines = [f"{ylabel}"]
    lines += [f"{ticks.get(k, ''):>{margin}} ┤{''.join(map(chr, row))}" for k, row in enumerate(cells)]
    last = f"{curve[-1][0]:,.0f} {xlabel}"
    lines += [" " * margin + " └" + "─" * width, " " * (margin + 2) + "0" + last.rjust(width - 1)]
    return "\n".join(lines)


def save_png(path: str | Path, curve: Curve, xlabel: str, ylabel: str, title: str) -> bool:
    """Writes the curve as a PNG, the folder made if needed; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # without pyplot: needs no display and keeps no global state
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel, title=title, yscale="log")
    axes.plot(*zip(*curve), alpha=0.3, label="each minibatch")
    axes.plot(*zip(*smoothed(curve, 60)), label="mean of neighbours")
    axes.grid(alpha=0.3)
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
