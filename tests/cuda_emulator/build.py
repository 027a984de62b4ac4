"""Compiles CUDA C by g++: kernels as they are for NVRTC, and the runtime that runs them; both kept in the cache folder.

The text is preprocessed first, so that kernels which macros make are seen as well. Then what g++ cannot be told by
macros is replaced: `__global__`, `__launch_bounds__`, and the two kinds of `__shared__` variables.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from dynbatch.cpu.cache import cache_directory
from dynbatch.errors import CompileError
from tests.cuda_emulator import asan

HERE = Path(__file__).parent
COMPILER = "g++"

# -Bsymbolic: a kernel may have the name of a C library function, which would be called instead.
_COMMON = ["-std=c++17", "-shared", "-Wl,-Bsymbolic", "-fPIC", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off"]
_COMMON += ["-fsanitize=address", "-fsanitize-sections=emulator_shared"] if asan.ENABLED else []
_RUNTIME = ["-O2", *_COMMON, "-Wall", "-Wextra"]
# The runtime answers what these checks call, so the library that g++ has for them is left out.
_MODULE = ["-O1", *_COMMON, "-w", "-fvisibility=hidden", "-fno-strict-aliasing"]
_MODULE += ["-fsanitize=alignment,bounds,integer-divide-by-zero", "-nodefaultlibs", f"-I{HERE}"]

_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # parentheses, up to three deep
_ALIGNMENT = rf"(?:(?:__attribute__|alignas)\s*{_NESTED}\s*)?"
_DYNAMIC = re.compile(rf"extern\s+{_ALIGNMENT}__shared__\s+{_ALIGNMENT}(\w[\w\s]*?)\s+{_ALIGNMENT}(\w+)\s*\[\s*\]\s*;")
_BOUNDS = re.compile(rf"__launch_bounds__\s*\(((?:[^(),]|{_NESTED})*)(?:,(?:[^()]|{_NESTED})*)?\)")
_KERNEL = re.compile(rf"(template\s*<[^{{}};]*>\s*)?__global__\s+void\s+(?:{_BOUNDS.pattern}\s*)?(\w+)")
_EXPORTED = '__attribute__((visibility("default")))'


def available() -> bool:
    """Whether there is a compiler."""
    return shutil.which(COMPILER) is not None


def translate(source: str) -> str:
    """CUDA C as C++ for g++: lines numbered as they were, and at the end a description of each kernel."""
    preprocess = [COMPILER, "-E", "-std=c++17", "-x", "c++", "-include", str(HERE / "cuda.h"), "-"]
    text = _run(preprocess, f'#line 1 "module"\n{source}\n')
    kernels = {name: bound or "1024" for template, bound, name in _KERNEL.findall(text) if not template}
    text = _BOUNDS.sub("", text)
    text = _DYNAMIC.sub(r"\1 *const \2 = reinterpret_cast<\1 *>(emulator_dynamic_shared);", text)
    text = re.sub(r"\b__shared__\b", 'static __attribute__((section("emulator_shared")))', text)
    text = re.sub(r"\b__global__\b", _EXPORTED, text)
    descriptions = [
        f'extern "C" {_EXPORTED} const emulator::Kernel emulator_kernel_{name} = '
        f'emulator::kernel<decltype({name}), {name}>("{name}", {bound});\n'
        for name, bound in kernels.items()
    ]
    return text + '#line 1 "kernels"\n' + "".join(descriptions)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The library that runs kernels; modules find it among the process's symbols."""
    text = (HERE / "runtime.cpp").read_text(encoding="utf-8")
    path = _compiled("runtime", text, [*_RUNTIME, f"-I{HERE}"], lambda: text)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.emulator_launch.argtypes = (
        pointer, pointer, pointer, pointer, size, ctypes.c_uint64, ctypes.c_char_p, size
    )  # fmt: skip
    library.emulator_find_damage.argtypes = (pointer, size, ctypes.c_int)
    library.emulator_find_damage.restype = ctypes.c_int64
    return library


@functools.cache
def module(source: str) -> ctypes.CDLL:
    """The library of a module."""
    runtime()
    return ctypes.CDLL(str(_compiled("module", source, _MODULE, lambda: translate(source))))


def _compiled(kind: str, source: str, flags: list[str], translated: Callable[[], str]) -> Path:
    """The library of a source; compiled where it is not in the cache folder under the hash of all it is made of."""
    key = hashlib.sha256("\0".join([_toolchain(), *flags, source]).encode()).hexdigest()[:24]
    folder = cache_directory() / "emulator"
    path = folder / f"{kind}_{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    os.close(handle)
    try:
        _run([COMPILER, *flags, "-x", "c++", "-", "-o", temporary], translated())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


@functools.cache
def _toolchain() -> str:
    """The compiler's version and the files that every module is made with."""
    texts = [(HERE / name).read_text(encoding="utf-8") for name in ("build.py", "cuda.h", "runtime.h")]
    return "\0".join([_run([COMPILER, "-dumpfullversion", "-dumpmachine"]), *texts])


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{COMPILER} does not compile this:\n{done.stderr}")
    return done.stdout
