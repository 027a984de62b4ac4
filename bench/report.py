"""Tables and plots of the rows: in the terminal, and as Markdown and PNG."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.measure import Configuration

Row = dict[str, Any]
CONFIGURATION = ("model", "mode", "hidden", "batch", "threads")
COLUMNS = (
    "system", "strategy", "total", "min", "max", "x DyNet", "x by hand", "record", "schedule", "run", "backward",
    "update", "tapes", "first", "nodes", "batches", "KiB gathered", "MiB", "GFLOP/s", "of BLAS",
)  # fmt: skip
TIMES = ("record", "schedule", "run", "backward", "update", "tapes", "first")
HEADLINE = (
    "model", "mode", "hidden", "batch", "threads", "dynbatch", "static", "DyNet", "by hand", "x DyNet", "x by hand",
    "static x DyNet", "static x by hand",
)  # fmt: skip
NOTES = """\
Times are medians in ms of one minibatch; `first` is the process's very first one, which compiles and allocates.
`x DyNet` is how many times faster than DyNet with the better of its strategies in the same configuration, `x by hand`
the same against PyTorch batched by hand. `record` is building the graph, or index tensors; `run` the forward pass.
`MiB` is the process's largest resident size (DyNet takes 2 GiB at its start). `of BLAS` is the share of what one large
product reaches with NumPy's BLAS, counting products only. Every system runs in a process of its own and on the same
minibatches, none of which it has seen before; they take turns, one minibatch each. Their losses agree to 1e-4, in
training also after updates. `dynbatch-static` shows what an epoch costs from the second one on: every instance was
recorded once before, by `@dy.static`, and the minibatches are new mixtures of these recordings; in the first epoch
there is `tapes` in addition, the time of making a minibatch's recordings."""


def groups(rows: list[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The rows of each configuration, in their order."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in CONFIGURATION), []).append(row)
    for key, members in found.items():
        yield dict(zip(CONFIGURATION, key)), members


def best(rows: list[Row], system: str) -> float | None:
    """The shortest total of a system's strategies, in ms; None where it was not measured."""
    return min((row["total_ms"] for row in rows if row["system"] == system), default=None)


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a table; empty for None."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def ratio(other: float | None, own: float | None) -> str:
    """How many times faster than ``other``; empty where one is missing."""
    return "" if other is None or own is None else f"{other / own:.2f}x"


def cells(rows: list[Row]) -> list[list[str]]:
    """The table of one configuration, without its head (`COLUMNS`)."""
    dynet, by_hand = best(rows, "dynet"), best(rows, "torch-by-hand")
    table = []
    for row in rows:
        gathered = row["bytes_gathered"]
        line = [row["system"], row["strategy"] or ""]
        line += [number(row[f"{name}_ms" if name else "total_ms"]) for name in ("total", "min", "max")]
        line += [ratio(dynet, row["total_ms"]), ratio(by_hand, row["total_ms"])]
        line += [number(row[f"{name}_ms"]) for name in TIMES]
        line += [number(row["nodes"], 0), number(row["batches"], 0)]
        line += [number(None if gathered is None else gathered / 1024, 0), number(row["peak_mib"], 0)]
        line += [number(row["gflops"], 1), f"{row['blas_share']:.0%}"]
        table.append(line)
    return table


def headline(rows: list[Row]) -> list[list[str]]:
    """A line for each configuration: dynbatch with the better of its strategies against the peers."""
    table = []
    for configuration, members in groups(rows):
        own = best(members, "dynbatch")
        if own is not None:
            static, *peers = (best(members, name) for name in ("dynbatch-static", "dynet", "torch-by-hand"))
            line = [str(configuration[name]) for name in CONFIGURATION]
            line += [number(x) for x in (own, static, *peers)]
            table.append(line + [ratio(x, of) for of in (own, static) for x in peers])
    return table


def text(head: tuple[str, ...], lines: list[list[str]], words: int = 2) -> str:
    """A table for the terminal: columns that are empty are left out; the first ``words`` are aligned at the left."""
    used = [k for k in range(len(head)) if any(line[k] for line in lines)]
    widths = {k: max(len(head[k]), *(len(line[k]) for line in lines)) for k in used}
    return "\n".join(
        "  ".join(line[k].ljust(widths[k]) if k < words else line[k].rjust(widths[k]) for k in used).rstrip()
        for line in (list(head), *lines)
    )


def markdown(head: tuple[str, ...], lines: list[list[str]], words: int = 2) -> str:
    """The same in Markdown."""
    used = [k for k in range(len(head)) if any(line[k] for line in lines)]
    rule = ["---" if k < words else "---:" for k in used]
    shown = [[line[k] for k in used] for line in (list(head), *lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (shown[0], rule, *shown[1:]))


def document(report: dict[str, Any], plots: list[str]) -> str:
    """The Markdown report."""
    machine, rows = report["machine"], report["rows"]
    peaks = ", ".join(
        f"{peak:,.0f} GFLOP/s on {Configuration.of_threads(threads)}"
        for threads, peak in machine["blas_peak_gflops"].items()
    )
    installed = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    parts = [
        "# dynbatch beside its peers",
        f"`{shlex.join(['python', '-m', 'bench', *report['arguments']])}`, {machine['date'][:10]}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; {installed}. BLAS peak: {peaks}.",
    ]
    parts += [f"**Missing:** {system} ({reason})" for system, reason in report["missing"].items()]
    parts += [f"**Went wrong:** {fault.splitlines()[0]}" for fault in report["faults"]]
    if lines := headline(rows):
        parts += ["## In short", markdown(HEADLINE, lines), "Best strategy of each; ms a minibatch."]
    parts += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    parts += ["## All figures", NOTES]
    for configuration, members in groups(rows):
        parts += [f"### {Configuration(**configuration)}", markdown(COLUMNS, cells(members))]
    return "\n\n".join(parts) + "\n"


def save(folder: str | Path, report: dict[str, Any]) -> list[Path]:
    """Writes ``bench.md`` and one PNG a model into ``folder``; returns what it wrote.

    Without matplotlib there are no PNGs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    models = dict.fromkeys(row["model"] for row in report["rows"])
    plots = [path for model in models if (path := plot(folder / f"{model}.png", model, report["rows"]))]
    written = folder / "bench.md"
    written.write_text(document(report, [path.name for path in plots]), encoding="utf-8")
    return [written, *plots]


def plot(path: Path, model: str, rows: list[Row]) -> Path | None:
    """Instances per second of each system with the better of its strategies, at the most threads measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = [row for row in rows if row["model"] == model]
    threads = max(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    panels = list(dict.fromkeys((row["mode"], row["batch"]) for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure = Figure(figsize=(4.6 * len(panels) + 1.6, 3.6), dpi=120, layout="constrained")
    for k, (mode, batch) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), k + 1)
        inside = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
        hidden = sorted({row["hidden"] for row in inside})
        width = 0.8 / len(systems)
        for s, system in enumerate(systems):
            for x, size in enumerate(hidden):
                own = [row for row in inside if row["system"] == system and row["hidden"] == size]
                if not own:
                    continue
                row = min(own, key=lambda row: row["total_ms"])
                rate, low, high = (1e3 * batch / row[name] for name in ("total_ms", "max_ms", "min_ms"))
                axes.bar(
                    x + (s - (len(systems) - 1) / 2) * width, rate, width, color=f"C{s}",
                    label=system if x == 0 else None, yerr=[[rate - low], [high - rate]], error_kw={"lw": 0.7},
                )  # fmt: skip
        axes.set(title=f"{model}, {mode}, batch {batch}", xlabel="hidden size", yscale="log")
        axes.set_xticks(range(len(hidden)), [str(size) for size in hidden])
        axes.grid(axis="y", alpha=0.3)
        if k == 0:
            axes.set_ylabel(f"instances/s, {Configuration.of_threads(threads)}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path)
    return path
