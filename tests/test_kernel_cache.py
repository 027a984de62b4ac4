"""Compiled kernels on disk: used again by the next process, and no harm where the folder or a file in it is bad."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dynbatch

SCRIPT = """
import dynbatch as dy

x = dy.inputVector([0.5, -1.0, 2.0])
gate = dy.cell(lambda x: (dy.cmult(dy.logistic(x), dy.tanh(x)), dy.concatenate([x, dy.square(x)])))
y, z = gate(x)
(dy.sum_elems(y) + dy.sum_elems(dy.exp(z))).backward(full=True)
assert {r.tier for r in dy.plan().batch_reports} == {"compiled"}
print(y.npvalue().tolist(), x.gradient().tolist())
"""


def run(cache: Path | str) -> tuple[str, str]:
    """What a process that compiles everything prints, and says on its standard error."""
    environment = os.environ | {"DYNBATCH_CACHE": str(cache), "DYNBATCH_COMPILE": "always"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def files(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (cache / "kernels").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that a first process has filled, and what that printed."""
    cache = tmp_path_factory.mktemp("cache")
    printed, said = run(cache)
    assert "compiling" in said and "cannot be used" not in said
    return cache, printed


def test_the_next_process_does_not_compile_again(filled: tuple[Path, str]) -> None:
    cache, printed = filled
    before = files(cache)
    assert {path.suffix for path in before} >= {".py", ".nbi", ".nbc"}
    assert run(cache) == (printed, "")
    assert files(cache) == before


def test_a_damaged_source_file_is_written_again(filled: tuple[Path, str]) -> None:
    cache, printed = filled
    sources = sorted((cache / "kernels").glob("*.py"))
    texts = [path.read_text() for path in sources]
    sources[0].write_text("this is not Python")
    sources[1].write_bytes(b"\xff\xfe\x00")
    sources[2].unlink()
    again, said = run(cache)
    assert again == printed and "cannot be used" not in said
    assert [path.read_text() for path in sources] == texts
    assert run(cache) == (printed, "")
    assert not list((cache / "kernels").glob("*.tmp"))


@pytest.mark.parametrize("content", [b"", b"not what numba wrote"], ids=["empty", "garbage"])
def test_a_damaged_index_costs_one_warning(filled: tuple[Path, str], content: bytes) -> None:
    cache, printed = filled
    kept = {path: path.read_bytes() for path in (cache / "kernels").rglob("*.nbi")}
    try:
        for path in kept:
            path.write_bytes(content)
        again, said = run(cache)
        assert again == printed
        assert said.count("cannot be used") == 1
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def test_a_folder_that_cannot_be_written_costs_one_warning(filled: tuple[Path, str], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("where a folder should be")
    again, said = run(blocked / "cache")
    assert again == filled[1]
    assert said.count("cannot be used") == 1
    assert "DYNBATCH_CACHE" in said


def test_processes_that_compile_one_kernel_for_different_types_at_once(tmp_path: Path) -> None:
    """The text of this kernel is the same in both precisions; numba's cache alone would mix up their code."""
    code = """
import sys
import dynbatch as dy
dy.init(dtype=sys.argv[1])
for x in (2.0, 3.0):
    print(round(dy.log(dy.scalarInput(x)).value(), 5))
"""
    for attempt in range(3):
        environment = {**os.environ, "DYNBATCH_COMPILE": "always", "DYNBATCH_CACHE": str(tmp_path / str(attempt))}
        both = [
            subprocess.Popen([sys.executable, "-c", code, dtype], env=environment, stdout=subprocess.PIPE, text=True)
            for dtype in ("float32", "float64")
        ]
        for process in both:
            assert process.communicate(timeout=120)[0].split() == ["0.69315", "1.09861"]
    third = subprocess.run(
        [sys.executable, "-c", code, "float64"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert third.stdout.split() == ["0.69315", "1.09861"]


HOLDER = """
import sys
from dynbatch.cpu import jit

def first(): pass
def second(): pass

with jit._alone({"first": first, "second": second}[sys.argv[1]]):
    print("has it", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_processes_wait_for_one_another_only_where_they_compile_the_same(tmp_path: Path) -> None:
    def hold(name: str) -> subprocess.Popen[str]:
        environment = os.environ | {"DYNBATCH_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", HOLDER, name]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    holder = hold("first")
    assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
    other = hold("second")
    assert other.communicate("\n", timeout=60)[0] == "has it\n"
    waiting = hold("first")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=2)
    holder.communicate("\n", timeout=60)
    assert waiting.communicate("\n", timeout=60)[0] == "has it\n"


def test_the_numpy_tier_runs_while_another_thread_compiles(tmp_path: Path) -> None:
    code = """
import threading, time
import dynbatch as dy
from dynbatch.cpu import kernels

go_on, compile = threading.Event(), kernels._compile
kernels._compile = lambda *args: (go_on.wait(), compile(*args))
cell = dy.cell(lambda x: dy.cmult(dy.tanh(x), dy.logistic(x)))

def run():
    dy.renew_cg()
    ends = [cell(dy.inputVector([0.1 * k, 1.0])) for k in range(40)]
    value = dy.esum([dy.sum_elems(e) for e in ends]).value()
    return value, next(r.tier for r in dy.plan().batch_reports if "lambda" in r.name)

found = [run() for _ in range(100)]
assert {tier for _, tier in found} == {"numpy"}, found
go_on.set()
deadline = time.monotonic() + 200
while run()[1] == "numpy" and time.monotonic() < deadline:
    time.sleep(0.05)
last = run()
assert last[1] == "compiled" and abs(last[0] - found[0][0]) < 1e-4, (last, found[0])
"""
    environment = os.environ | {"DYNBATCH_CACHE": str(tmp_path), "DYNBATCH_COMPILE": "background"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "compiling" in done.stderr


def test_code_of_another_file_that_has_changed_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    """What is compiled contains what it calls; numba's cache alone looks at the caller's file."""
    package = tmp_path / "dynbatch"
    shutil.copytree(Path(dynbatch.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    caller = "from dynbatch.cpu.jit import jit\nfrom dynbatch.cpu.called import called\n"
    (package / "cpu" / "caller.py").write_text(f"{caller}\n@jit()\ndef caller():\n    return called()\n")
    answers = []
    for answer in ("1", "2", "2"):
        called = f"from dynbatch.cpu.jit import jit\n\n@jit()\ndef called():\n    return {answer}\n"
        (package / "cpu" / "called.py").write_text(called)
        code = "from dynbatch.cpu.caller import caller; print(caller(), sum(caller.stats.cache_hits.values()))"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "DYNBATCH_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        answers.append(done.stdout.split())
    assert answers == [["1", "0"], ["2", "0"], ["2", "1"]]
