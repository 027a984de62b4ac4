"""What a user installs: the wheel's contents, the package outside of the checkout, and what importing it loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from dynbatch import compiled

CHECKOUT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "*.pyc", "*.so", "compiled.*.txt", "*.safetensors", "shared",
    "venv",
)  # fmt: skip
# Planted in the copy that the wheel is built from, so that this holds before the first kernel is written.
PLANTED_KERNEL = "dynbatch/cuda/kernels/planted.cu"


def run(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """Run a Python command that must succeed, away from the checkout; returns its standard output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYNBATCH_", "PYTHON"))}
    finished = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=kept | environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, f"{arguments} failed:\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves files beside its source, and takes up those of an earlier build."""
    copy = tmp_path_factory.mktemp("source") / "dynbatch"
    shutil.copytree(CHECKOUT, copy, ignore=NOT_SOURCE)
    kernel = copy / PLANTED_KERNEL
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_text("// planted by a test\n")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled modules, built without network from what `make setup` installed."""
    return build(source, tmp_path_factory.mktemp("wheel"), DYNBATCH_PURE="1")


def translated(folder: Path) -> Path:
    """A copy of the checkout with what Cython has made of the modules there, which takes as long as compiling that."""
    copy = folder / "source"
    shutil.copytree(CHECKOUT, copy, ignore=NOT_SOURCE)
    made = Path("build", "cython")
    if (CHECKOUT / made).exists():
        shutil.copytree(CHECKOUT / made, copy / made)
    return copy


def build(source: Path, out: Path, **environment: str) -> Path:
    """The wheel of a copy of the checkout."""
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    run("-m", "pip", "wheel", *options, "-w", out, source, cwd=out, **environment)
    (built,) = out.glob("*.whl")
    return built


def files(wheel: Path) -> set[str]:
    """What of the package is in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("dynbatch/")}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dynbatch"}


def test_the_wheel_holds_every_file_of_the_package(source: Path, wheel: Path) -> None:
    written = {path.relative_to(source).as_posix() for path in (source / "dynbatch").rglob("*") if path.is_file()}
    assert files(wheel) == written
    assert {"dynbatch/py.typed", PLANTED_KERNEL} <= written


def test_the_wheel_holds_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("LICENSE")]
        assert archive.read(name).decode() == (CHECKOUT / "LICENSE").read_text()


PROGRAM = """
import dynbatch as dy
x = dy.inputVector([1, 2])
print(dy.__file__)
print(dy.compiled.in_use)
print((2 * x).npvalue().tolist())
"""


def installed(wheel: Path, folder: Path) -> tuple[str, str]:
    """Install a wheel and run a program with it: whether its modules are compiled, and what the program prints."""
    target = folder / "installed"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=folder)
    place, used, value = run("-c", PROGRAM, cwd=folder, PYTHONPATH=str(target)).splitlines()
    assert Path(place).is_relative_to(target)
    return used, value


def test_the_installed_wheel_runs_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.endswith("-none-any.whl")
    assert installed(wheel, tmp_path) == ("False", "[2.0, 4.0]")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_wheel_with_compiled_modules(wheel: Path, tmp_path: Path) -> None:
    built = build(translated(tmp_path), tmp_path, CFLAGS="-O0")  # takes half as long
    suffix = EXTENSION_SUFFIXES[0]
    modules = {f"dynbatch/{module.replace('.', '/')}{suffix}" for module in compiled.MODULES}
    assert files(built) == files(wheel) - {PLANTED_KERNEL} | modules | {f"dynbatch/{compiled.STAMP}"}
    assert not built.name.endswith("-any.whl")
    assert installed(built, tmp_path) == ("True", "[2.0, 4.0]")


def test_without_a_compiler_the_wheel_is_uncompiled(wheel: Path, tmp_path: Path) -> None:
    built = build(translated(tmp_path), tmp_path, CC="false")
    assert files(built) == files(wheel) - {PLANTED_KERNEL}
    assert installed(built, tmp_path) == ("False", "[2.0, 4.0]")


def test_importing_loads_nothing_that_is_only_needed_later(tmp_path: Path) -> None:
    """A GPU, CuPy and greenlet are not needed to import, and what is slow to import waits until it is used."""
    later = ("cupy", "greenlet", "matplotlib", "numba.cuda", "torch")
    loaded = run("-c", "import sys, dynbatch; print(*sys.modules, sep='\\n')", cwd=tmp_path).split()
    assert "dynbatch" in loaded
    assert not [name for name in loaded if name in later or name.startswith(tuple(f"{part}." for part in later))]
