"""What the kernels cost on real architectures: `python -m dynbatch.cuda.report` compiles them, which takes no GPU.

It prints registers, shared memory and spilled bytes of every fixed kernel and of generated ones, for each architecture
that the installed NVRTC knows. A kernel that spills registers makes it fail.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dynbatch.config import DTYPES
from dynbatch.cuda import sources
from dynbatch.cuda.codegen import generate
from dynbatch.cuda.representative import regions
from dynbatch.errors import CompileError, DeviceError

ARCHITECTURES = (75, 80, 90, 120)
"""Turing, Ampere, Hopper and Blackwell."""

_OPTIONS = ("--std=c++17", "--ptxas-options=-v")
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers([^\n]*)", re.DOTALL
)
_SHARED = re.compile(r"(\d+) bytes smem")


class Usage(NamedTuple):
    """What one kernel takes: registers of a thread, bytes of shared memory of a block, bytes that a thread spills."""

    registers: int
    shared: int
    spilled: int

    def __str__(self) -> str:
        return (
            f"{self.registers}"
            + f" +{self.shared}" * bool(self.shared)
            + f" SPILLS {self.spilled}" * bool(self.spilled)
        )


def compile_for(source: str, architecture: int) -> dict[str, Usage]:
    """Compile CUDA C to machine code; what each kernel in it takes.

    Raises:
        CompileError: with the compiler's messages.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{architecture}", *_OPTIONS))
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    found = {}
    for name, spilled, registers, rest in _ENTRY.findall(log):
        shared = _SHARED.search(rest)
        found[name] = Usage(int(registers), int(shared[1]) if shared else 0, int(spilled))
    return found


def architectures() -> list[int]:
    """Those of `ARCHITECTURES` that the installed NVRTC compiles for.

    Raises:
        DeviceError: there is none; says what to install.
    """
    try:
        from cupy.cuda import nvrtc

        supported = nvrtc.getSupportedArchs()
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"no NVRTC ({error}): pip install 'dynbatch[cuda13]'") from error
    return [a for a in ARCHITECTURES if a in supported]


def all_sources(dtypes: Sequence[str]) -> dict[tuple[str, str], str]:
    """By name and dtype: each file of fixed kernels, and each different kernel of the representative programs."""
    found = {(f"{file}.cu", dtype): sources.text(file, dtype) for dtype in dtypes for file in sources.FILES}
    for name, program, region in regions():
        for dtype in dtypes:
            text = sources.generated(generate(program, region, dtype).text, dtype)
            if text not in found.values():
                found[name, dtype] = text
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dynbatch.cuda.report", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="only this one; may be given several times")
    parser.add_argument(
        "--arch", type=int, action="append", help="only this one, 90 for instance; several are possible"
    )
    given = parser.parse_args(arguments)
    try:
        targets = given.arch or architectures()
    except DeviceError as error:
        print(f"dynbatch.cuda.report: {error}", file=sys.stderr)
        return 2
    texts = all_sources(given.dtype or DTYPES)
    print(f"{'registers, + bytes of shared memory':56} {'':8} " + " ".join(f"{f'sm_{a}':>12}" for a in targets))
    count = spills = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = {key: [pool.submit(compile_for, text, a) for a in targets] for key, text in texts.items()}
        for (name, dtype), futures in compiled.items():
            usages = [future.result() for future in futures]
            for kernel in sorted(usages[0]):
                label = name if kernel == "kernel" else f"{name} {kernel}"
                print(f"{label:56} {dtype:8} " + " ".join(f"{usage[kernel]!s:>12}" for usage in usages))
                count += len(usages)
                spills += sum(usage[kernel].spilled > 0 for usage in usages)
    print(f"{count} kernels compiled, {spills} of them spill registers")
    return int(spills > 0)


if __name__ == "__main__":
    sys.exit(main())
