"""The documents say what is so: README's code runs as written, and the names in the map of the code exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
ARCHITECTURE = CHECKOUT / "docs" / "architecture.md"
SOURCES = [path for folder in ("dynbatch", "models") for path in (CHECKOUT / folder).rglob("*.py")]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|[\w-]+\.(?:py|md|cfg|toml)")


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return _FENCE.findall(path.read_text(encoding="utf-8"))


def code_names(path: Path) -> list[str]:
    """What stands between backticks in the running text."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", path.read_text(encoding="utf-8")))


def run_python(code: str, folder: Path) -> str:
    """Run a program as a user would, with the settings' defaults; returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYNBATCH_")}
    # one thread, since tests run beside each other; who multiplies would be measured, and differ
    environment |= {"PYTHONPATH": str(CHECKOUT), "DYNBATCH_THREADS": "1", "DYNBATCH_BLAS": "own"}
    if "DYNBATCH_CACHE" in os.environ:
        environment["DYNBATCH_CACHE"] = os.environ["DYNBATCH_CACHE"]
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape_of(output: str) -> list[str]:
    """The lines of an output, with a # for every number and single spaces."""
    return [" ".join(re.sub(r"\d+(\.\d+)?", "#", line).split()) for line in output.strip().splitlines()]


EXAMPLES = [text for language, text in blocks(CHECKOUT / "README.md") if language == "python"]


@pytest.mark.parametrize("number", range(1, len(EXAMPLES)))
def test_readme_code_runs_as_written(number: int, tmp_path: Path) -> None:
    assert run_python(EXAMPLES[number], tmp_path)


def test_readme_example_learns_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    output = run_python(EXAMPLES[0], tmp_path)
    (shown,) = [text for language, text in blocks(CHECKOUT / "README.md") if language == "text"]
    # sorted, since the plan's rows come slowest first, and which is slowest is a matter of what else the machine does
    assert sorted(shape_of(output)) == sorted(shape_of(shown))
    right, count = map(int, re.search(r"(\d+) of (\d+) new formulas right", output).groups())  # type: ignore[union-attr]
    assert right > 0.9 * count


def test_the_example_of_custom_op_runs_as_written(tmp_path: Path) -> None:
    """The example for the CPU, which is one batch; and with it that for GPUs, as far as it goes without one."""
    on_cpu, on_gpu = [text for language, text in blocks(CHECKOUT / "docs" / "custom_op.md") if language == "python"]
    assert re.search(r"^sparsemax +\(4,\) +1 +3 ", run_python(on_cpu, tmp_path), re.MULTILINE)
    checked = "import dynbatch as dy\ndy.init(debug=True)\n" + on_cpu
    assert run_python(checked, tmp_path)
    compared = "print(sparsemax(dy.inputVector([1, 0.5, -2])).value())"
    assert run_python(on_cpu + on_gpu + compared, tmp_path).splitlines()[-1] == "[0.75, 0.25, 0.0]"


def test_contributing_code_is_python() -> None:
    code = re.findall(r"^ *```python\n(.*?)^ *```$", DOCUMENTS[1].read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(code) >= 6
    for number, text in enumerate(code, start=1):
        indent = len(text) - len(text.lstrip(" "))
        compile(re.sub(rf"^ {{{indent}}}", "", text, flags=re.MULTILINE), f"<block {number}>", "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_files_exist(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


def test_files_named_in_the_architecture_exist() -> None:
    files = {name for name in code_names(ARCHITECTURE) if _FILE.fullmatch(name)}
    assert len(files) > 20
    assert not sorted(name for name in files if not (CHECKOUT / name).exists())


def test_every_module_is_in_the_map() -> None:
    named = {CHECKOUT / name for name in code_names(ARCHITECTURE) if _FILE.fullmatch(name)}
    modules = {path for path in (CHECKOUT / "dynbatch").rglob("*.py") if path.name != "__init__.py"}
    unnamed = {path for path in modules if not named & {path, *path.parents}}
    assert not sorted(str(path.relative_to(CHECKOUT)) for path in unnamed), "not in the map in docs/architecture.md"


def test_names_in_the_architecture_exist() -> None:
    """Each part of a dotted name occurs in the sources; a renamed class or function shows here."""
    known = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)))
    names = {n for n in code_names(ARCHITECTURE) if re.fullmatch(r"[A-Za-z_][\w.]*", n) and not _FILE.fullmatch(n)}
    assert len(names) > 30
    assert not sorted(name for name in names if not set(name.split(".")) <= known)


def test_environment_variables_in_the_readme_exist() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    from dynbatch.config import _PARSERS

    known = {f"DYNBATCH_{name.upper()}" for name in _PARSERS} | set(re.findall(r'"(DYNBATCH_[A-Z]+)"', sources))
    found = set(re.findall(r"DYNBATCH_[A-Z_]+[A-Z]", (CHECKOUT / "README.md").read_text(encoding="utf-8")))
    assert found and found <= known
