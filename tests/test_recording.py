"""Recording is the same whether its modules are compiled or not; compiled ones are used only for their own sources."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from bench import recording, trees
from dynbatch import compiled
from dynbatch.graph import state

CHECKOUT = Path(__file__).resolve().parent.parent
PROGRAMS = 150


def python(*arguments: str, folder: Path = CHECKOUT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that holds the package; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "DYNBATCH_PURE" and name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def recorded(**environment: str) -> list[dict[str, Any]]:
    return json.loads(python("-m", "tests.recorded_programs", str(PROGRAMS), **environment).stdout)


@pytest.fixture(scope="module")
def built() -> None:
    """Skip where there is nothing to compare with."""
    if compiled.built_from() != compiled.digest():
        pytest.skip("the compiled modules are not built")


def test_compiled_and_uncompiled_record_the_same(built: None) -> None:
    """Streams, payload, handles, signatures and errors, of programs that are wrong here and there."""
    ours, pure = recorded(), recorded(DYNBATCH_PURE="1")
    assert len(ours) == len(pure) == PROGRAMS + 1
    assert ours[0] == pure[0], "signatures and docstrings"
    for seed, (mine, other) in enumerate(zip(ours[1:], pure[1:])):
        assert mine == other, f"program {seed}"
    assert sum(len(p["errors"]) for p in pure[1:]) > 5 * PROGRAMS
    assert sum(p["values"] for p in pure[1:]) > 40 * PROGRAMS


def test_the_environment_chooses(built: None) -> None:
    program = "import dynbatch; print(dynbatch.compiled.in_use, dynbatch.graph.__file__)"
    for value, used, suffix in (
        ("0", "True", ".so"),
        ("", "True", ".so"),
        ("1", "False", ".py"),
        ("yes", "False", ".py"),
    ):
        done = python("-c", program, DYNBATCH_PURE=value)
        told, file = done.stdout.split()
        assert (told, Path(file).suffix) == (used, suffix)
        assert done.stderr == ""


@pytest.fixture
def copied(built: None, tmp_path: Path) -> Path:
    """The package with its compiled modules, to be changed."""
    shutil.copytree(CHECKOUT / "dynbatch", tmp_path / "dynbatch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


FILES = "import dynbatch, sys; print(*[sys.modules[f'dynbatch.{m}'].__file__ for m in dynbatch.compiled.MODULES])"


@pytest.mark.parametrize("name", ["graph.py", "ops/record.pxd", "watch.pyx"])
def test_changed_sources_are_what_runs(name: str, copied: Path) -> None:
    done = python("-c", FILES, folder=copied)
    assert all(file.endswith(".so") for file in done.stdout.split()) and done.stderr == ""
    source = copied / "dynbatch" / name
    source.write_text(source.read_text() + "\n# changed\n")
    os.utime(source, (0, 0))  # however old it looks
    done = python("-c", FILES, folder=copied)
    assert all(file.endswith(".py") for file in done.stdout.split())
    assert done.stderr.count("RuntimeWarning") == 1 and "make setup" in done.stderr
    done = python("-c", FILES, folder=copied, DYNBATCH_PURE="1")
    assert all(file.endswith(".py") for file in done.stdout.split()) and done.stderr == ""


def test_what_a_failed_build_left_is_not_used(copied: Path) -> None:
    (copied / "dynbatch" / compiled.STAMP).unlink()
    done = python("-c", FILES, folder=copied)
    assert all(file.endswith(".py") for file in done.stdout.split()) and done.stderr == ""


def test_the_digest_is_of_every_source(tmp_path: Path) -> None:
    sources = tmp_path / "dynbatch"
    shutil.copytree(CHECKOUT / "dynbatch", sources, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    seen = {compiled.digest(), compiled.digest(str(sources))}
    assert len(seen) == 1
    for number, module in enumerate(compiled.MODULES, start=2):
        path = sources.joinpath(*module.split(".")).with_suffix(".py")
        path.write_text(path.read_text() + "#")
        seen.add(compiled.digest(str(sources)))
        assert len(seen) == number


def test_a_view_of_the_stream_keeps_what_it_shows() -> None:
    x = dy.inputVector([1.0, 2.0])
    view = state.graph.stream
    array = np.frombuffer(view, np.int64)
    before = array.tolist()
    for _ in range(5000):
        x = dy.tanh(x)
    assert array.tolist() == before == view.tolist()
    assert state.graph.stream[: len(before)].tolist() == before
    assert len(state.graph.stream) == len(before) + 2 * 5000


def test_errors_name_the_users_line() -> None:
    """Compiled functions have no frames, so that a function of the package that calls them must not be named."""
    x, y = dy.inputVector([1.0, 2.0]), dy.inputVector([1.0, 2.0, 3.0])
    for wrong in (
        lambda: dy.cmult(x, y),
        lambda: x + y,
        lambda: dy.esum([]),
        lambda: dy.cmult(x, 1.0),
        lambda: dy.pickneglogsoftmax(x, 7),
        lambda: dy.affine_transform([x, y]),
        lambda: x * "2",
    ):
        with pytest.raises((dy.DynbatchError, TypeError)) as error:
            wrong()
        assert f"test_recording.py:{wrong.__code__.co_firstlineno}: " in str(error.value)


def test_a_subclass_on_the_right_keeps_the_order_of_operands() -> None:
    """Python asks the right operand first where its class derives from the left one's, as that of a batch does."""
    W = dy.inputTensor(np.arange(6.0).reshape(2, 3))
    x = dy.inputTensor(np.ones((3, 2)), batched=True)
    np.testing.assert_array_equal((W * x).npvalue(), [[3.0, 3.0], [12.0, 12.0]])
    y = dy.inputVector([1.0, 2.0, 3.0])
    np.testing.assert_array_equal((y - x).npvalue(), [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    np.testing.assert_array_equal((y / x).npvalue(), [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])


def test_expressions_are_not_copied() -> None:
    x, batch = dy.inputVector([1.0]), dy.inputTensor(np.ones((2, 2)), batched=True)
    for e in (x, batch):
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                how(e)
    assert {x: 1}[x] == 1 and x != batch and x == x
    assert isinstance(batch, dy.Expression)


def test_threads_record_apart_and_their_expressions_do_not_mix() -> None:
    x = dy.inputVector([1.0, 2.0])
    made, errors = [], []

    def record(number: int) -> None:
        own = dy.inputVector([float(number)] * 2)
        for _ in range(300):
            own = dy.tanh(own) + own
        made.append((number, own.npvalue()))
        for wrong in (lambda: dy.tanh(x), lambda: x + own, lambda: own + x, lambda: dy.esum([own, x])):
            try:
                wrong()
            except dy.StaleExpressionError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 16 and all("test_recording.py" in error for error in errors)
    for number, value in made:
        expected = np.full(2, number, np.float32)
        for _ in range(300):
            expected = np.tanh(expected) + expected
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert len(state.graph.stream) == 2


def test_a_cell_is_one_object_before_and_after_its_traces() -> None:
    class Model:
        @dy.cell
        def double(self, x: Any, times: Any) -> Any:
            return x * 2 if times is None else x * times

    model, x = Model(), dy.inputVector([1.0, 2.0])
    double = model.double
    for times, factor in ((None, 2), (3, 3), (0.5, 0.5), (None, 2), (4, 4)):
        np.testing.assert_array_equal(double(x, times).npvalue(), [factor, 2 * factor])
    assert model.double is double
    assert repr(double) == f"<cell {Model.__qualname__.replace('<locals>.', '')}.double>"


def test_threads_that_trace_one_cell_do_not_mix_its_forms() -> None:
    """Whichever thread traced last, a call is recorded as a whole by what fits it."""

    class Model:
        @dy.cell
        def scale(self, x: Any, factor: float) -> Any:
            return x * factor

    model, failures = Model(), []

    def record(size: int) -> None:
        x = dy.inputVector([1.0] * size)
        made = [model.scale(x, float(k)) for k in range(500)]
        if not np.array_equal(dy.esum(made).npvalue(), np.full(size, 500 * 499 / 2, np.float32)):
            failures.append(size)

    threads = [threading.Thread(target=record, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_tapes_in_graphs_that_number_signatures_differently() -> None:
    W = dy.ParameterCollection().add_parameters((2, 2), init=np.array([[1.0, 2.0], [3.0, 4.0]]))

    @dy.static
    def layer(x: Any, rows: int) -> Any:
        return W * dy.cmult(x, dy.inputVector([rows, rows + 1.0]))

    def expected(x: Any, rows: int) -> Any:
        return W.as_array() @ (np.array(x) * [rows, rows + 1.0])

    for first in (None, dy.exp, None, lambda x: W * x):
        dy.renew_cg()
        x = dy.inputVector([1.0, -2.0])
        if first is not None:
            first(x)
        for rows in (1, 2, 1):
            np.testing.assert_allclose(layer(x, rows).npvalue(), expected([1.0, -2.0], rows), rtol=1e-6)
    dy.init(debug=True)  # compares tapes with fresh recordings
    np.testing.assert_allclose(layer(x, 1).npvalue(), expected([1.0, -2.0], 1), rtol=1e-6)
    assert layer.cache_info().currsize == 2


def test_the_benchmark_has_a_line_for_each_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"BATCH": 2, "BATCHES": 2, "HIDDEN": 4, "REPEATS": 1}.items():
        monkeypatch.setattr(recording, name, value)
    monkeypatch.setattr(trees, "GENERATED", 4)
    recording.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[0] == ("compiled" if compiled.in_use else "uncompiled")
    assert [line.split()[0] for line in lines] == list(recording.WAYS)
