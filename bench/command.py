"""The command line: ``python -m bench``. Without flags it is a version of about five minutes.

``--ablation`` and ``--growth`` measure other things instead; see `bench.ablation` and `bench.growth`.

``--json`` writes ``{"machine": ..., "arguments": [...], "missing": {...}, "faults": [...], "rows": [...]}``: the rows
as `bench.measure.row` describes them (empty with ``--ablation`` or ``--growth``, whose rows are under these names),
``missing`` the systems that are not installed, and ``faults`` what went wrong.
It is written after every configuration, so that an interrupted run keeps what it has measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import ablation, growth, machine, models, report
from bench.measure import Configuration, Entry, WorkerFault, measure, peak
from bench.systems import SYSTEMS
from dynbatch.errors import FileFormatError

PEERS = sorted({system.library for system in SYSTEMS.values() if system.peer})
STRATEGIES = ("agenda", "depth", "off")
MODES = ("infer", "train")
QUICK = ("birnn", "lm", "treelstm")  # the models of the five-minute version
BUSY = 0.3  # of the cores; with as many other processes the figures are of no use


def parser() -> argparse.ArgumentParser:
    """Its defaults are the five-minute version."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compares dynbatch with DyNet and PyTorch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    known = models.names()
    parser.add_argument(
        "--models", nargs="+", choices=known, default=list(QUICK), metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--hidden", nargs="+", type=positive, default=[64], metavar="N", help="hidden sizes")
    parser.add_argument("--batch", nargs="+", type=positive, default=[64], metavar="N", help="minibatch sizes")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="forward only, or training steps")
    parser.add_argument("--against", nargs="*", choices=PEERS, default=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument(
        "--threads", nargs="+", type=positive, default=[machine.cores()], metavar="N", help="numbers of threads"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=(*STRATEGIES, "all"),
        default=["agenda", "depth"],
        help="of dynbatch and DyNet",
    )
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="timed minibatches of each row")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folder of training data, or MODEL=DIR for the data of one model; none: generated data",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--ablation", action="store_true", help="instead: what each step from DyNet's way to dynbatch's is worth"
    )
    instead.add_argument(
        "--growth", action="store_true", help="instead: time per node against the nodes and against the batch size"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--report", metavar="DIR", help="write a Markdown report with plots")
    return parser


def positive(text: str) -> int:
    """An argument that must be an integer from 1 on."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def chosen_systems(module: Any, against: list[str], strategies: list[str]) -> list[Entry]:
    """Dynbatch's systems, and those of the peers, that the model has."""
    return [
        Entry(name, strategy)
        for name, system in SYSTEMS.items()
        if name in module.PROGRAMS and (not system.peer or system.library in against)
        for strategy in system.strategies
        if strategy is None or strategy in strategies or "all" in strategies
    ]


def folder(model: str, data: list[str]) -> str | None:
    """Where ``--data`` says that a model's data is; None for generated data."""
    found = None
    for item in data:
        name, equals, path = item.partition("=")
        if not equals or name not in models.names():
            found = found or item
        elif name == model:
            return path
    return found


def write_json(path: str | None, found: dict[str, Any]) -> None:
    """As a whole: an interruption leaves the file as it was before."""
    if path is not None:
        new = Path(path).with_name(Path(path).name + ".new")
        new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)


def run(arguments: list[str]) -> dict[str, Any]:
    """Measure what the flags say; prints tables and returns what ``--json`` writes."""
    flags = parser()
    args = flags.parse_args(arguments)
    if args.json and not Path(args.json).absolute().parent.is_dir():
        flags.error(f"there is no folder to write {args.json} to")
    kind = "ablation" if args.ablation else "growth" if args.growth else "rows"
    found: dict[str, Any] = {
        "machine": machine.description(),
        "arguments": arguments,
        "missing": {},
        "faults": [],
        "rows": [],
    }
    found.setdefault(kind, [])
    if (busy := found["machine"]["load"]) and busy > BUSY * machine.cores():
        print(f"bench: other processes keep this machine busy (load {busy:.1f}): do not trust times", file=sys.stderr)
    peaks = {threads: peak(threads) for threads in args.threads}
    found["machine"]["blas_peak_gflops"] = peaks
    for name in args.models:
        module = models.find(name)
        instances, sizes = module.load(folder(name, args.data))
        if args.growth:
            grow(name, instances, sizes, args, found)
            write_json(args.json, found)
            continue
        if len(instances) < max(args.batch):
            flags.error(f"{name} has {len(instances)} {module.UNIT}, too few for a minibatch of {max(args.batch)}")
        if args.ablation:
            systems, found["skipped"] = ablation.entries(module)
        else:
            systems = chosen_systems(module, args.against, args.strategies)
        timed = [mode for mode in args.mode if mode in getattr(module, "MODES", MODES)]
        for mode, batch, threads, hidden in itertools.product(timed, args.batch, args.threads, args.hidden):
            configuration = Configuration(name, hidden, batch, mode, threads)
            present = [entry for entry in systems if entry.system not in found["missing"]]
            with tqdm(total=args.repeats, desc=str(configuration), unit="round", leave=False, disable=None) as bar:

                def progress(what: str, bar: tqdm = bar) -> None:
                    bar.set_postfix_str(what, refresh=True)
                    bar.update(what == "timing")

                new = measure(configuration, present, instances, sizes, args.repeats, peaks[threads], progress)
            for system, reason in new.missing.items():
                print(f"{system}: missing ({reason})\n")
            for fault in new.faults:
                print(f"FAULT: {fault}\n", file=sys.stderr)
            found[kind] += new.rows
            found["missing"] |= new.missing
            found["faults"] += new.faults
            write_json(args.json, found)
            if new.rows:
                head, lines = report.table(kind, new.rows)
                print(f"{configuration} (ms)\n{report.text(head, lines, words=2)}\n")
    for step, reason in found.get("skipped", {}).items():
        print(f"{step}: skipped ({reason})")
    if lines := report.headline(found["rows"]):
        print(f"ms a minibatch, the best strategy of each\n{report.text(report.HEADLINE, lines)}")
    if args.report and found[kind]:
        print("\nwritten: " + ", ".join(map(str, report.save(args.report, found))))
    return found


def grow(model: str, instances: list, sizes: dict[str, int], args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure one model with ``--growth`` and print it."""
    systems = chosen_systems(models.find(model), [], args.strategies)
    job = (model, args.hidden[0], args.threads[0])
    with tqdm(total=len(systems), desc=f"{model}, growth", leave=False, disable=None) as bar:
        for entry in systems:
            bar.set_postfix_str(str(entry))
            try:
                found["growth"] += (new := growth.measure(*job, entry, instances, sizes, args.repeats))
            except WorkerFault as error:
                print(f"FAULT: {error}\n", file=sys.stderr)
                found["faults"].append(str(error))
            else:
                print(f"{model}, {entry} (us a node)\n{report.text(report.GROWTH, report.growth_cells(new), 4)}\n")
            bar.update()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a system failed or its losses differed. A missing peer is no failure."""
    try:
        found = run(sys.argv[1:] if arguments is None else arguments)
    except (OSError, WorkerFault, FileFormatError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; the file of --json has what was measured", file=sys.stderr)
        return 130
    return 1 if found["faults"] else 0
