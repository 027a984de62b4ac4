"""Products by each who can compute them, against NumPy in double precision; and who is chosen, and remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.cpu import blas, products, profile, tiers
from dynbatch.errors import ConfigurationError

SHAPES = ((1, 1), (1, 7), (9, 1), (5, 10), (16, 48), (37, 50), (128, 320))
WHO = [
    "own",
    pytest.param("numpy", marks=pytest.mark.skipif(not blas.numpy_gemm("float32")[0], reason="NumPy's BLAS is hidden")),
    pytest.param("mkl", marks=pytest.mark.skipif(blas.mkl_path() is None, reason="MKL is not installed")),
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is known, and what is measured here is not kept."""
    known = products.state()
    products.set_state({})
    yield
    products.set_state(known)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(profile, "cache_directory", lambda: tmp_path)
    return tmp_path


def tolerance(dtype: str) -> float:
    return 1e-4 if dtype == "float32" else 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("who", WHO)
def test_multiply_in_flat_memory(monkeypatch: pytest.MonkeyPatch, who: str, dtype: str) -> None:
    """Weights in any layout, rows at a distance, results at a distance; nothing else is written."""
    monkeypatch.setenv("DYNBATCH_BLAS", who)
    rng = np.random.default_rng(1)
    for inner, width in SHAPES:
        matrix = rng.normal(size=(inner, width)).astype(dtype)
        wide = np.repeat(matrix, 2, axis=1)[:, ::2]
        for layout in (matrix, np.asfortranarray(matrix), wide):
            factor = products.factor(layout)
            assert factor.kinds_text() == who
            for rows in (0, 1, 2, 9, 33, 130):
                x_stride, out_stride = inner + 3, width + 2
                mem = rng.normal(size=11 + rows * (x_stride + out_stride)).astype(dtype)
                x = np.lib.stride_tricks.as_strided(mem[5:], (rows, inner), (x_stride * mem.itemsize, mem.itemsize))
                start = 5 + rows * x_stride
                expected = mem.copy()
                for r in range(rows):
                    at = start + r * out_stride
                    expected[at : at + width] = x[r].astype("float64") @ matrix.astype("float64")
                products.multiply(mem, 5, x_stride, rows, factor.table, start, out_stride)
                np.testing.assert_allclose(mem, expected, atol=tolerance(dtype), rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("who", WHO)
def test_product_of_arrays(monkeypatch: pytest.MonkeyPatch, who: str, dtype: str) -> None:
    """Any strides: what BLAS cannot take goes through NumPy."""
    monkeypatch.setenv("DYNBATCH_BLAS", who)
    rng = np.random.default_rng(3)
    for rows, inner, width in ((1, 1, 1), (3, 4, 5), (1, 20, 6), (20, 1, 6), (17, 33, 1), (0, 3, 4), (3, 0, 4)):
        x, m = rng.normal(size=(rows, inner)).astype(dtype), rng.normal(size=(inner, width)).astype(dtype)
        expected = x.astype("float64") @ m.astype("float64")
        for a in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], np.repeat(x, 2, axis=0)[::2]):
            for b in (m, np.asfortranarray(m), np.repeat(m, 3, axis=1)[:, ::3]):
                np.testing.assert_allclose(products.product(a, b), expected, atol=tolerance(dtype), rtol=0)
                out = np.zeros((rows, width + 1), dtype)
                products.product(a, b, out[:, :width])
                np.testing.assert_allclose(out[:, :width], expected, atol=tolerance(dtype), rtol=0)
                assert not out[:, width].any()


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNBATCH_BLAS", "atlas")
    with pytest.raises(ConfigurationError, match="'atlas': choose one of auto, own, numpy, mkl"):
        products.factor(np.ones((2, 2)))


def test_mkl_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNBATCH_BLAS", "mkl")
    monkeypatch.setattr(blas, "mkl_path", lambda: None)
    with pytest.raises(ConfigurationError, match="MKL is not installed"):
        products.factor(np.ones((2, 2)))


def test_a_hidden_blas_leaves_the_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "mkl_path", lambda: None)
    monkeypatch.setattr(blas, "numpy_gemm", lambda dtype: (0, 0))
    for who in ("auto", "numpy"):
        monkeypatch.setenv("DYNBATCH_BLAS", who)
        assert set(products.factor(np.ones((2, 2))).kinds) == {"own"}


def test_the_choice_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setenv("DYNBATCH_BLAS", "auto")
    first = products.factor(np.ones((6, 7), np.float32)).kinds
    (answers,) = json.loads((empty_cache / "profile.json").read_text()).values()
    for rows, kind in zip((4, 16, 64, 256), first):
        assert answers[f"float32 6x7, {rows} rows"] == kind
    assert products.state() == answers
    monkeypatch.setattr(profile, "_measure", lambda candidates: pytest.fail("measured again"))
    products.set_state({})  # as in the next process
    assert products.factor(np.ones((6, 7), np.float32)).kinds == first


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"somewhere else": 3}', "\0"])
def test_a_damaged_profile_is_measured_again(empty_cache: Path, content: str) -> None:
    (empty_cache / "profile.json").write_text(content)
    waits = {"a": lambda: sum(range(20000)), "b": lambda: None}
    assert profile.answer("which", {name: lambda run=run: run for name, run in waits.items()}) == "b"
    assert "which" in (empty_cache / "profile.json").read_text()


def test_a_folder_that_cannot_be_written_is_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setattr(profile, "cache_directory", lambda: tmp_path / "file")
    assert profile.answer("which", {"a": lambda: lambda: None}) == "a"


def test_the_first_is_kept_unless_another_is_clearly_faster(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slower, expected in ((1.05, "first"), (1.2, "second")):
        clock = [0.0]
        monkeypatch.setattr(profile.time, "perf_counter", lambda clock=clock: clock[0])

        def taking(seconds: float, clock: list[float] = clock):
            def run() -> None:
                clock[0] += seconds

            return lambda: run

        assert profile.answer(f"{slower}", {"first": taking(slower), "second": taking(1.0)}) == expected


def test_what_a_checkpoint_says_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can be: what is not installed here is measured anew."""
    monkeypatch.setenv("DYNBATCH_BLAS", "auto")
    monkeypatch.setattr(blas, "mkl_path", lambda: None)
    monkeypatch.setattr(profile, "_read", dict)
    monkeypatch.setattr(profile, "_write", lambda question, found: None)
    monkeypatch.setattr(profile, "_measure", lambda candidates: "own")
    names = {f"float64 6x7, {rows} rows": who for rows, who in ((4, "numpy"), (16, "own"), (64, "numpy"), (256, "mkl"))}
    matrix = np.ones((6, 7))
    assert set(products.factor(matrix).kinds) == {"own"}
    products.set_state(names)
    factor = products.factor(matrix)
    if blas.numpy_gemm("float64")[0]:
        assert factor.kinds == ("numpy", "own", "numpy", "own")
        assert factor.kinds_text() == "numpy to 8 rows, own to 32 rows, numpy to 128 rows, then own"
    mem = np.ones(150 * 13)
    for rows in (1, 8, 9, 32, 33, 128, 129, 150):
        mem[rows * 6 :] = 0
        products.multiply(mem, 0, 6, rows, factor.table, rows * 6, 7)
        assert (mem[rows * 6 : rows * 13] == 6).all() and not mem[rows * 13 :].any()
        mem[:] = 1


def test_the_plan_says_who_multiplied() -> None:
    tiers.set_mode("always")
    W = dy.ParameterCollection().add_parameters((5, 3))
    (W * dy.inputVector([1, 2, 3])).value()
    assert dy.plan().products == {"float32 3x5": "own"}
    assert "products: float32 3x5 own" in repr(dy.plan())
    tiers.set_mode("never")
    dy.renew_cg()
    (W * dy.inputVector([1, 2, 3])).value()
    assert dy.plan().products == {} and "products" not in repr(dy.plan())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_multiplies_on_its_own() -> None:
    """It has none of the helpers, and starts its own."""
    script = """
        import os
        import numpy as np
        import dynbatch as dy
        from dynbatch.cpu import products
        from dynbatch.cpu.team import TEAM

        dy.init(threads=2)
        products.apply_threads()
        matrix, mem = np.ones((200, 300)), np.ones(100 * 500)
        factor = products.factor(matrix)

        def right(factor):
            mem[20000:] = 0
            products.multiply(mem, 0, 200, 100, factor.table, 20000, 300)
            return (mem[20000:] == 200).all()

        assert right(factor)
        child = os.fork()
        if child == 0:
            good = right(factor) and right(products.factor(matrix)) and right(factor)
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert right(factor)
        print("done")
        """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(run, env={**os.environ, "DYNBATCH_BLAS": "own"}, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
