"""What a machine with a GPU says of the CUDA backend: ``python -m bench.gpu_check``, in under four minutes.

It compares the device with the CPU, times kernels and models, and prints a table last; `docs/gpu.md` explains it. Each
section is a process of its own, so that a fault which takes the device along, or a kernel that never ends, costs no
more than what it was met in. It needs nothing but the package, CuPy, hypothesis and, if it is there, PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench import gpu_programs, gpu_timing
from bench.gpu_timing import trace
from dynbatch import compiled
from dynbatch.cuda import devices
from dynbatch.cuda.driver import Driver
from dynbatch.errors import DynbatchError

DEVICE = "cuda:0"
SHARES = {"check": 0.45, "kernels": 0.1, "models": 0.45}  # of the time, for each section; what is left goes to the next
PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "torch", "numpy", "numba", "numba-cuda")
SHOWN = 15  # differences that are printed; all are counted
RESTARTS = 5  # of a section whose device was lost
HIDDEN, BATCH, REPEATS = (256, 64), 64, 15
LOST = 3  # exit status of a section that cannot go on, since the device is in no state to
clock = time.perf_counter

Note = Callable[..., None]
"""Writes a finding, by its kind, to where the parent process reads it."""


# ---- what there is ---------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The device and the versions.

    Raises:
        DynbatchError: there is no device; says why.
    """
    properties = devices.driver(DEVICE).properties
    found: dict[str, Any] = {
        "card": properties.name,
        "capability": ".".join(map(str, properties.capability)),
        "memory_gib": round(properties.memory / 2**30, 1),
        "multiprocessors": properties.multiprocessors,
        "recording": "compiled" if compiled.in_use else "not compiled",
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
    }
    module = Path("/proc/driver/nvidia/version")
    if module.exists() and (number := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", module.read_text())):
        found["driver"] = number[1]
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "cupy" in sys.modules:
        runtime = importlib.import_module("cupy").cuda.runtime
        for name, number in (("driver_cuda", runtime.driverGetVersion()), ("cuda", runtime.runtimeGetVersion())):
            found[name] = f"{number // 1000}.{number % 1000 // 10}"
    return found


# ---- sections, each in its process -----------------------------------------------------------------------------------


def check(note: Note, until: float, smoke: bool, start: int = 0) -> int:
    """Run the cases from number ``start`` on until the time is over; gives the exit status."""
    cases = enumerate(gpu_programs.cases(smoke))
    for number, case in cases:
        if number < start:
            continue
        if clock() > until:
            note("cut", f"comparison: {number} programs were reached, from {case} on none")
            break
        note("case", number)
        try:
            for line in case.differences(DEVICE):
                note("difference", line)
        except Exception as error:
            note("difference", f"{case}: {trace(error)}")
            if not alive(devices.driver(DEVICE)):
                return LOST
        note("done", number)
    return 0


def alive(driver: Driver) -> bool:
    """Whether the device still does what it is asked for: after some faults it does nothing any more."""
    try:
        driver.synchronize()
        address = driver.allocate(16)
        driver.fill(address, 0, 16)
        driver.free(address)
        driver.synchronize()
    except Exception:
        return False
    return True


def kernels(note: Note, until: float, smoke: bool, start: int = 0) -> int:
    """Bandwidths."""
    driver = devices.driver(DEVICE)
    for name, rate, share in gpu_timing.copies(driver, smoke):
        note("kernel", {"kernel": name, "gb_s": rate, "share_of_copy": share})
    for name, rate, launches in gpu_timing.fused(driver, DEVICE, smoke):
        note("kernel", {"kernel": f"fused: {name}", "gb_s": rate, "launches": launches})
        if clock() > until:
            note("cut", f"kernels behind {name}")
            break
    return 0


def models(note: Note, until: float, smoke: bool, start: int = 0) -> int:
    """Times of models; ``start`` is the number of the first contest."""
    sizes = (8,) if smoke else HIDDEN
    contests = [(hidden, model, mode) for hidden in sizes for model in gpu_timing.MODELS for mode in gpu_timing.MODES]
    for number, (hidden, model, mode) in enumerate(contests):
        if number < start:
            continue
        left = until - clock()
        if left <= 0:
            note("cut", f"{model}, {mode}, hidden {hidden}")
            continue
        note("case", number)
        share = clock() + left / (len(contests) - number)
        batch, repeats = (2, 1) if smoke else (BATCH, REPEATS)

        def failed(system: str, line: str, where: str = f"{model}, {mode}, hidden {hidden}") -> None:
            note("peer" if system.startswith("torch") else "fault", f"{where}, {system}: {line}")

        contest = gpu_timing.Contest(DEVICE, model, mode, hidden, batch, repeats, until if smoke else share, failed)
        contest.everything()
        note("row", contest.row)
        if not alive(devices.driver(DEVICE)):
            return LOST
        note("done", number)
    return 0


SECTIONS = {"check": check, "kernels": kernels, "models": models}


def run_section(name: str, seconds: float, smoke: bool, start: int, path: str) -> int:
    """What a section's process does: findings go to a file, a line each."""
    with open(path, "a", encoding="utf-8") as file:

        def note(kind: str, content: Any) -> None:
            file.write(json.dumps([kind, content]) + "\n")
            file.flush()

        devices.driver(
            DEVICE
        ).red_zone = 0  # whole plans are prepared before they run, as on a GPU, on the emulator too
        try:
            return SECTIONS[name](note, clock() + seconds, smoke, start)
        except Exception as error:
            note("fault", f"{name}: {trace(error)}")
            return 1


# ---- the whole -------------------------------------------------------------------------------------------------------


def findings(name: str, seconds: float, smoke: bool) -> list[tuple[str, Any]]:
    """Run a section's process, and another one behind what the device was lost in."""
    until, start, found = clock() + seconds, 0, []
    for _ in range(1 + RESTARTS):
        left = until - clock()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "findings"
            command = [sys.executable, "-m", "bench.gpu_check", "--section", name, "--start", str(start)]
            command += ["--seconds", str(max(left, 1)), "--findings", str(path), *["--smoke"] * smoke]
            end, text = run_process(command, max(left, 1) + GRACE, path)
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        part = [tuple(json.loads(line)) for line in lines]
        found += part
        if end == 0:
            break
        last = [number for kind, number in part if kind == "case"]
        where = f"{name}, number {last[-1]}" if last else name
        how = "took too long" if end is None else f"ended with status {end}"
        if end != LOST or not part:
            found.append(("fault", f"{where}: its process {how}{': ' + text if text else ''}"))
        if not last or clock() > until:
            break
        start = last[-1] + 1
    return found


GRACE, STALL = 20.0, 50.0
"""Seconds that a section may take beyond its time, since what it is in the midst of is finished, and without a word."""


def run_process(command: list[str], seconds: float, path: Path) -> tuple[int | None, str]:
    """Exit status, None where it was stopped, and its last words; its findings go to ``path``."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=log, stderr=log)
        begin = changed = clock()
        size, end = -1, process.poll()
        while end is None and clock() < min(begin + seconds, changed + STALL):
            if (now := path.stat().st_size if path.exists() else 0) != size:
                size, changed = now, clock()
            time.sleep(0.05)
            end = process.poll()
        if end is None:
            process.kill()
            process.wait()
        log.seek(0)
        return end, " | ".join(log.read().decode(errors="replace").strip().splitlines()[-3:])[-400:]


def report(name: str, found: list[tuple[str, Any]]) -> int:
    """Print a section's findings, compactly; how many of them are failures."""
    of: dict[str, list[Any]] = {}
    for kind, content in found:
        of.setdefault(kind, []).append(content)
    differences, faults = of.get("difference", []), of.get("fault", [])
    if name == "check":
        print(f"compared {len(of.get('done', []))} programs: {len(differences)} differences")
    for line in differences[:SHOWN]:
        print(f"DIFFERS {line[:250]}")
    if differences[SHOWN:]:
        print(f"... and {len(differences) - SHOWN} more")
    for entry in of.get("kernel", []):
        share = f", {entry['share_of_copy']:.0%} of CUDA's copy" if entry.get("share_of_copy") else ""
        print(f"{entry['kernel']}: {entry['gb_s']:.0f} GB/s{share}")
    for row in of.get("row", []):
        print(f"{row['model']}, {row['mode']}, hidden {row['hidden']}: {detail(row)}")
    for line in faults[:SHOWN]:
        print(f"FAULT {line[:500]}")
    for line in of.get("peer", []):
        print(f"not measured: {line[:300]}")
    for line in of.get("cut", []):
        print(f"out of time: {line}")
    return len(differences) + len(faults)


def detail(row: dict[str, Any]) -> str:
    """What the table has no room for."""
    parts = [f"{name} {ms:.2f}" for name, ms in row.get("phases", {}).items()]
    lines = f"cells' host phases in ms: {', '.join(parts)}; launches {row.get('launches', '?')}"
    if "torch_prepare" in row:
        lines += f"; PyTorch's index tensors {row['torch_prepare']:.2f} ms"
    if "cut" in row:
        lines += f"; out of time: {', '.join(row['cut'])}"
    return "\n  ".join([lines, *row.get("longest", [])])


COLUMNS = {
    "dynet_like": "DyNet-like", "cells": "cells", "replay": "replay", "captured": "captured", "device": "device",
    "torch": "PyTorch", "torch_graph": "its graph",
}  # fmt: skip
RATIOS = {
    "cells x DyNet": ("dynet_like", "cells"), "replay x DyNet": ("dynet_like", "replay"),
    "replay x PyTorch": ("torch", "replay"), "captured x graph": ("torch_graph", "captured"),
    "replay x graph": ("torch_graph", "replay"),
}  # fmt: skip
NOTE = f"""\
ms a minibatch (batch {BATCH}, float32, medians); "cells x DyNet": how many times faster cells are than DyNet-like.
DyNet-like: plain ops, agenda, a kernel an op, a gather copy an operand. replay: @dy.static. captured: the same
minibatch again, as a CUDA graph. device: the kernels of cells alone (training without the update). PyTorch: batched by
hand, index tensors made each time; its graph: one fixed minibatch."""


def table(rows: list[dict[str, Any]]) -> str:
    """The table of models."""

    def figure(row: dict[str, Any], name: str) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value:.2f}"

    def ratio(row: dict[str, Any], slow: str, fast: str) -> str:
        a, b = row.get(slow), row.get(fast)
        return f"{a / b:.2f}x" if a and b else "-"

    head = ["model", "mode", "hidden", *COLUMNS.values(), *RATIOS]
    lines = [
        [row["model"], row["mode"], str(row["hidden"]), *(figure(row, name) for name in COLUMNS)]
        + [ratio(row, *pair) for pair in RATIOS.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in [head, *lines])


def parser() -> argparse.ArgumentParser:
    """The flags; those without help are for the sections' processes."""
    found = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.split("\n")[0])
    found.add_argument("--seconds", type=float, default=200, help="time for all of it (default: %(default)s)")
    found.add_argument("--json", metavar="FILE", help="write all findings")
    found.add_argument(
        "--smoke", action="store_true", help="tiny sizes, one repeat: whether it runs; times mean nothing"
    )
    found.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    found.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    found.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    found.add_argument("--findings", help=argparse.SUPPRESS)
    return found


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit status: 0, 1 where something differed or failed, 2 where there is no device."""
    begin = clock()
    args = parser().parse_args(arguments)
    if args.section:
        return run_section(args.section, args.seconds, args.smoke, args.start, args.findings)
    try:
        about = machine()
    except DynbatchError as error:
        print(f"bench.gpu_check: {' '.join(str(error).split())}")
        return 2
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    failures, every = 0, {}
    for name in args.only:
        left = begin + args.seconds - clock()
        following = [SHARES[other] for other in args.only[args.only.index(name) :]]
        print(f"-- {name}", flush=True)
        every[name] = findings(name, left * SHARES[name] / sum(following), args.smoke)
        failures += report(name, every[name])
        sys.stdout.flush()
    rows = [content for kind, content in every.get("models", []) if kind == "row"]
    result = "all as on the CPU, nothing failed" if not failures else f"{failures} DIFFERENCES AND FAULTS, see above"
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": about, "failures": failures, **every}, indent=1) + "\n")
    print(f"-- {result}; {clock() - begin:.0f} s\n{NOTE}\n{table(rows)}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
