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
    "system", "strategy", "total", "min", "max", "x DyNet", "x PyTorch", "record", "schedule", "run", "backward",
    "update", "tapes", "first", "nodes", "batches", "KiB gathered", "MiB", "GFLOP/s", "of BLAS",
)  # fmt: skip
PYTORCH = ("torch-by-hand", "torch-one-by-one")  # a model has one of them
TIMES = ("record", "schedule", "run", "backward", "update", "tapes", "first")
HEADLINE = (
    "model", "mode", "hidden", "batch", "threads", "dynbatch", "static", "DyNet", "PyTorch", "x DyNet", "x PyTorch",
    "static x DyNet", "static x PyTorch",
)  # fmt: skip
ABLATION = ("step", "system", "total", "min", "max", "x first", "x before", *COLUMNS[7:])
GROWTH = (
    "model", "system", "strategy", "against", "hidden", "instances", "nodes", "batches", "record", "schedule", "run",
    "total",
)  # fmt: skip
ABLATION_NOTES = """\
Each line adds one thing to all above it, under agenda batching. DyNet's way is plain ops, each a node of its own, run
by NumPy one op at a time. Horizontal fusion makes one product of those that share an input; vertical fusion compiles
what lies between products into one kernel each, and the batch into one step; packed products are dynbatch's own, of
weights packed once per update, instead of NumPy's BLAS; layout orders the rows of a batch by their consumers; static
replay is `@dy.static` with every instance recorded before, as from the second epoch on. `x first` is how many times
faster than DyNet's way, `x before` than the line above. Losses agree to 1e-4. Times are medians in ms."""
GROWTH_NOTES = """\
Forward passes without keeping values for backward, of minibatches drawn at random with repetition; medians in
microseconds a node. A node is a cell or an op, so that systems are to be compared with themselves only.
`dynbatch-static` replays recordings made before."""
NOTES = """\
Times are medians in ms of one minibatch; `first` is the process's very first one, which compiles and allocates.
`x DyNet` is how many times faster than DyNet with the better of its strategies in the same configuration, `x PyTorch`
the same against PyTorch, batched by hand, or one instance after another where values decide what comes next. `record`
is building the graph, or index tensors; `run` the forward pass (together where values are read in between).
`MiB` is the process's largest resident size (DyNet takes 2 GiB at its start). `of BLAS` is the share of what one large
product reaches with NumPy's BLAS, counting products only. Every system runs in a process of its own and on the same
minibatches, none of which it has seen before; they take turns, and in each a minibatch that is not timed goes first, so
that caches and cores are as they are in a loop. The garbage collector is kept off what is there once a system is warm
(`gc.freeze`, as in `models/training.py`). Their losses agree to 1e-4, in training also after updates.
`dynbatch-static` shows what an epoch costs from the second one on: every instance was recorded once before, by
`@dy.static`, and the minibatches are new mixtures of these recordings; in the first epoch `record` is replaced by
`tapes`, what a minibatch takes whose instances are seen for the first time."""


def groups(rows: list[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The rows of each configuration, in their order."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in CONFIGURATION), []).append(row)
    for key, members in found.items():
        yield dict(zip(CONFIGURATION, key)), members


def best(rows: list[Row], *systems: str) -> float | None:
    """The shortest total of these systems and their strategies, in ms; None where none was measured."""
    return min((row["total_ms"] for row in rows if row["system"] in systems), default=None)


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
    dynet, pytorch = best(rows, "dynet"), best(rows, *PYTORCH)
    table = []
    for row in rows:
        gathered = row["bytes_gathered"]
        line = [row["system"], row["strategy"] or ""]
        line += [number(row[f"{name}_ms" if name else "total_ms"]) for name in ("total", "min", "max")]
        line += [ratio(dynet, row["total_ms"]), ratio(pytorch, row["total_ms"])]
        line += [number(row[f"{name}_ms"]) for name in TIMES]
        line += [number(row["nodes"], 0), number(row["batches"], 0)]
        line += [number(None if gathered is None else gathered / 1024, 0), number(row["peak_mib"], 0)]
        line += [number(row["gflops"], 1), f"{row['blas_share']:.0%}"]
        table.append(line)
    return table


def ablation_cells(rows: list[Row]) -> list[list[str]]:
    """The ablation of one configuration, without its head (`ABLATION`)."""
    table, before = [], rows[0]["total_ms"]
    for row, line in zip(rows, cells(rows)):
        gains = [ratio(other, row["total_ms"]) for other in (rows[0]["total_ms"], before)]
        table.append([row["step"], row["system"], *line[2:5], *gains, *line[7:]])
        before = row["total_ms"]
    return table


def growth_cells(rows: list[Row]) -> list[list[str]]:
    """The growth of one model, without its head (`GROWTH`); times in microseconds a node."""
    return [
        [row["model"], row["system"], row["strategy"], row["against"]]
        + [number(row[name], 0) for name in ("hidden", "instances", "nodes", "batches")]
        + [number(row[f"{name}_us"]) for name in ("record", "schedule", "run", "total")]
        for row in rows
    ]


def table(kind: str, rows: list[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Head and lines for the rows of one configuration, of the comparison or of the ablation."""
    return (ABLATION, ablation_cells(rows)) if kind == "ablation" else (COLUMNS, cells(rows))


def headline(rows: list[Row]) -> list[list[str]]:
    """A line for each configuration: dynbatch with the better of its strategies against the peers."""
    table = []
    for configuration, members in groups(rows):
        own = best(members, "dynbatch")
        if own is not None:
            static, *peers = best(members, "dynbatch-static"), best(members, "dynet"), best(members, *PYTORCH)
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


def beginning(title: str, report: dict[str, Any]) -> list[str]:
    """How each document begins: the command, the machine, and what is missing."""
    machine = report["machine"]
    peaks = ", ".join(
        f"{peak:,.0f} GFLOP/s on {Configuration.of_threads(threads)}"
        for threads, peak in machine["blas_peak_gflops"].items()
    )
    installed = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    parts = [
        f"# {title}",
        f"`{shlex.join(['python', '-m', 'bench', *report['arguments']])}`, {machine['date'][:10]}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; {installed}. BLAS peak: {peaks}.",
    ]
    missing = report["missing"] | report.get("skipped", {})
    parts += [f"**Missing:** {system} ({reason})" for system, reason in missing.items()]
    return parts + [f"**Went wrong:** {fault.splitlines()[0]}" for fault in report["faults"]]


def document(report: dict[str, Any], plots: list[str], others: list[str]) -> str:
    """The comparison in Markdown; ``others`` are the files of other documents."""
    rows = report["rows"]
    parts = beginning("dynbatch beside its peers", report)
    if lines := headline(rows):
        parts += ["## In short", markdown(HEADLINE, lines), "Best strategy of each; ms a minibatch."]
    parts += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    if others:
        parts.append("See also " + " and ".join(f"[{name}]({name})" for name in others) + ".")
    parts += ["## All figures", NOTES]
    for configuration, members in groups(rows):
        parts += [f"### {Configuration(**configuration)}", markdown(COLUMNS, cells(members))]
    return "\n\n".join(parts) + "\n"


def ablation_document(report: dict[str, Any]) -> str:
    """The ablation in Markdown."""
    parts = [*beginning("From DyNet's way to dynbatch's, one step at a time", report), ABLATION_NOTES]
    for configuration, members in groups(report["ablation"]):
        parts += [f"## {Configuration(**configuration)}", markdown(ABLATION, ablation_cells(members))]
    return "\n\n".join(parts) + "\n"


def growth_document(report: dict[str, Any], plots: list[str]) -> str:
    """The growth in Markdown."""
    parts = [*beginning("Time per node", report), GROWTH_NOTES]
    parts += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    return "\n\n".join([*parts, markdown(GROWTH, growth_cells(report["growth"]), 4)]) + "\n"


def save(folder: str | Path, report: dict[str, Any]) -> list[Path]:
    """Writes into ``folder`` what was measured, and returns what it wrote.

    That is ``bench.md`` and one PNG a model, or ``ablation.md``, or ``growth.md`` and one PNG a model. Without
    matplotlib there are no PNGs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = next(kind for kind in ("rows", "ablation", "growth") if report.get(kind))
    rows, plots = report[kind], []
    for model in dict.fromkeys(row["model"] for row in rows):
        if kind == "rows":
            plots.append(plot(folder / f"{model}.png", model, rows))
        elif kind == "growth":
            plots.append(growth_plot(folder / f"growth-{model}.png", [row for row in rows if row["model"] == model]))
    plots = [path for path in plots if path]
    names = [path.name for path in plots]
    if kind == "rows":
        written, text = (
            folder / "bench.md",
            document(report, names, [name for name in ("ablation.md", "growth.md") if (folder / name).exists()]),
        )
    elif kind == "ablation":
        written, text = folder / "ablation.md", ablation_document(report)
    else:
        written, text = folder / "growth.md", growth_document(report, names)
    written.write_text(text, encoding="utf-8")
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


def growth_plot(path: Path, rows: list[Row]) -> Path | None:
    """Time per node against nodes and against batch size: in all, and (dashed) of scheduling."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = list(dict.fromkeys((row["system"], row["strategy"]) for row in rows))
    figure = Figure(figsize=(11, 3.8), dpi=120, layout="constrained")
    for k, (against, key) in enumerate((("nodes", "nodes"), ("batch size", "instances"))):
        axes = figure.add_subplot(1, 2, k + 1)
        for s, (system, strategy) in enumerate(lines):
            own = [
                row for row in rows if (row["system"], row["strategy"], row["against"]) == (system, strategy, against)
            ]
            x = [row[key] for row in own]
            axes.plot(x, [row["total_us"] for row in own], "o-", color=f"C{s}", ms=3, label=f"{system} ({strategy})")
            axes.plot(x, [row["schedule_us"] for row in own], "--", color=f"C{s}", lw=1)
        axes.set(xlabel=against, xscale="log", yscale="log", title=f"{rows[0]['model']}, hidden {rows[0]['hidden']}")
        axes.grid(alpha=0.3)
        if k == 0:
            axes.set_ylabel("us a node; dashed: scheduling")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)
    return path
