"""The benchmark: its rows and tables, and that a difference, a failure or a missing peer is told. Nothing is timed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

import numpy as np
import pytest

from bench import ablation, command, growth, machine, measure, models, report
from bench.measure import Configuration, Entry, Missing, WorkerFault
from bench.models import birnn, lm, mvrnn, nestedrnn, treelstm
from bench.systems import SYSTEMS, Dynbatch, MissingPeer, Torch
from bench.worker import PASSES, Job, Minibatches, Session
from dynbatch.errors import FileFormatError

KEYS = {
    "model", "hidden", "batch", "mode", "threads", "system", "strategy", "blas", "replay", "nodes", "batches",
    "bytes_gathered", "record_ms", "schedule_ms", "run_ms", "backward_ms", "update_ms", "total_ms", "min_ms", "max_ms",
    "first_ms", "tapes_ms", "repeats", "peak_mib", "gflops", "blas_share",
}  # fmt: skip
TREES = [((1, 2), 0), (((3, 1), 2), 1), ((4, (1, (2, 2))), 2), (5, 0), (((1, 2), (3, 4)), 1)]
SIZES = {"words": 6, "classes": 3}
OWN = ("dynbatch", "dynbatch-static", "dynbatch-plain")
SMALL = Configuration("treelstm", 8, 2, "infer", 1)


SENTENCES = [(0, 1, 2, 1, 0), (3, 1), (2, 2, 4), (0, 4, 3, 1), (1, 0)]
TAGGED = [(words, tuple(word % 3 for word in words)) for words in [*SENTENCES[1:], (4,)]]
DOCUMENTS = [(tuple(SENTENCES[k:]), k % 3) for k in range(5)]
SHAPES = [((), ((), ())), (), (((((),),),),), ((), (), ((),)), ((), ())]
GROWING = list(zip(SENTENCES, SHAPES))
DATA = {
    "treelstm": (TREES, SIZES),
    "mvrnn": (TREES, SIZES),
    "birnn": (TAGGED, {"words": 5, "tags": 3}),
    "lm": (SENTENCES, {"words": 5}),
    "nestedrnn": (DOCUMENTS, {"words": 5, "classes": 3}),
    "berxit": ([((0, k, 2, 1), k) for k in range(1, 6)], {"words": 6, "classes": 3, "length": 4}),
    "stackrnn": (SENTENCES, {"words": 5, "actions": 4}),
    "drnn": (GROWING, {"words": 5, "labels": 4}),
}


@pytest.fixture(params=DATA)
def model(request) -> str:
    return request.param


def session(system: str, strategy: str | None = None, mode: str = "train", model: str = "treelstm") -> Session:
    return Session(Job(model, system, strategy, 8, 5, mode, *DATA[model]))


def test_a_tiny_run_yields_rows_with_all_keys(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    path = tmp_path / "bench.json"
    flags = "--models treelstm --hidden 8 --batch 2 --mode infer train --against --threads 1 --strategies depth"
    status = command.main([*flags.split(), "--repeats", "2", "--json", str(path), "--report", str(tmp_path / "report")])
    assert status == 0, capsys.readouterr().err
    found = json.loads(path.read_text())
    assert found["missing"] == {} and found["faults"] == []
    assert found["machine"]["blas_peak_gflops"]["1"] > 0
    seen = {(row["system"], row["mode"]) for row in found["rows"]}
    assert seen == {(name, mode) for name in OWN for mode in ("infer", "train")}
    for row in found["rows"]:
        assert set(row) == KEYS
        trains = row["mode"] == "train"
        assert (row["backward_ms"] is not None) == trains == (row["update_ms"] is not None)
        assert 0 < row["min_ms"] <= row["total_ms"] <= row["max_ms"]
        assert row["replay"] == (row["system"] == "dynbatch-static") == (row["tapes_ms"] is not None)
        assert row["nodes"] > row["batches"] > 0 and row["peak_mib"] > 10 and row["repeats"] == 2
    text = (tmp_path / "report" / "bench.md").read_text()
    assert "### treelstm, train, hidden 8, batch 2, 1 thread" in text and "treelstm.png" in text
    assert (tmp_path / "report" / "treelstm.png").read_bytes().startswith(b"\x89PNG")
    assert "dynbatch-plain" in capsys.readouterr().out


def test_the_systems_of_dynbatch_give_the_same_losses(model):
    right, _ = session("dynbatch", "agenda", model=model).compare()
    for system in set(OWN[1:]) & set(models.find(model).PROGRAMS):
        np.testing.assert_allclose(session(system, "depth", model=model).compare()[0], right, rtol=1e-5)
    assert right[0] != right[1]  # an update in between


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if system is Torch])
def test_pytorch_gives_the_losses_of_dynbatch(system, model):
    pytest.importorskip("torch")
    if system not in models.find(model).PROGRAMS:
        pytest.skip("it is not written for this system")
    right, _ = session("dynbatch", "agenda", model=model).compare()
    losses, _ = session(system, model=model).compare()
    np.testing.assert_allclose(losses, right, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("dynet") is None, reason="DyNet is not installed")
def test_dynet_gives_the_losses_of_dynbatch(model):
    worker = measure.Worker("dynet", 1)  # in a process of its own: its import changes how floats are rounded
    worker.send(Job(model, "dynet", "agenda", 8, 5, "train", *DATA[model]))
    worker.receive()
    losses, _ = worker.ask("compare")
    worker.close()
    np.testing.assert_allclose(losses, session("dynbatch", "agenda", model=model).compare()[0], rtol=1e-5)


def test_models_that_decide_by_what_they_compute_are_timed_in_inference_only(monkeypatch, capsys):
    monkeypatch.setattr(command, "peak", lambda threads: 1.0)
    seen = []
    monkeypatch.setattr(command, "measure", lambda c, *_: seen.append(c.mode) or measure.Findings())
    assert command.main(["--models", "stackrnn", "lm"]) == 0
    assert seen == ["infer", "infer", "train"]


def test_comparing_puts_the_weights_back():
    trained = session("dynbatch", "agenda")
    assert trained.compare()[0] == trained.compare()[0]


def test_minibatches_are_the_same_everywhere_and_reshuffled_for_every_pass():
    def numbers(k):
        return Minibatches(list(range(10)), 5)[k]

    assert numbers(0) == numbers(0)
    assert sorted(numbers(0) + numbers(1)) == sorted(numbers(2) + numbers(3)) == list(range(10))
    assert numbers(0) + numbers(1) != numbers(2) + numbers(3)
    with pytest.raises(ValueError, match="do not fill"):
        Minibatches([1, 2], 3)


def test_flops_count_the_products():
    assert treelstm.flops(((1, 2), 0), 10, SIZES) == 2 * (2 * 3 * 100 + 10 * 100 + 3 * 10)
    assert treelstm.flops((1, 0), 10, SIZES) == 2 * (3 * 100 + 3 * 10)
    assert mvrnn.flops((((1, 2), 3), 0), 10, SIZES) == 2 * (2 * 4 * 100 + 2 * 1000 + 3 * 10)
    assert mvrnn.flops((1, 0), 10, SIZES) == 2 * 3 * 10


def test_flops_of_sentences():
    assert lm.flops((1, 2, 3), 10, {"words": 7}) == 2 * (40 * (2 * 10 + 10) + 2 * 7 * 10)
    assert birnn.flops(((1, 2), (0, 0)), 10, {"tags": 3}) == 2 * (2 * 40 * (2 * 10 + 10) + 2 * 3 * 20)


def test_flops_of_documents():
    assert nestedrnn.flops((((1, 2, 3), (1,)), 0), 10, {"classes": 3}) == 2 * ((5 + 1 + 3 * 3) * 100 + 3 * 10)


def test_documents(tmp_path):
    (tmp_path / "train.txt").write_text("1 to be | or not\n0 be\n")
    assert nestedrnn.load(str(tmp_path)) == ([(((0, 1), (2, 3)), 1), (((1,),), 0)], {"words": 4, "classes": 2})
    documents, sizes = nestedrnn.load(None)
    assert (documents, sizes) == nestedrnn.load(None)
    assert {len(words) for found, _ in documents for words in found} == set(range(20, 41))


def test_tagged_words(tmp_path):
    (tmp_path / "dev.txt").write_text("the|O Japanese|I-MISC band|O\n\na|b|O the|O\n")
    assert birnn.load(str(tmp_path)) == ([((0, 1, 2), (0, 1, 0)), ((3, 0), (0, 0))], {"words": 4, "tags": 2})
    (tmp_path / "train.txt").write_text("the|O\nband\n")
    with pytest.raises(FileFormatError, match=r"train\.txt, line 2"):
        birnn.load(str(tmp_path))


def test_sentences(tmp_path):
    (tmp_path / "train.txt").write_text("<s> to be </s>\n<s> be </s>\n")
    assert lm.load(str(tmp_path)) == ([(0, 1, 2, 3), (0, 2, 3)], {"words": 4})
    (tmp_path / "train.txt").write_text("word\n")
    with pytest.raises(FileFormatError, match="line 1"):
        lm.load(str(tmp_path))


def test_generated_sentences_are_unequal_and_always_the_same():
    tagged, sizes = birnn.load(None)
    assert (tagged, sizes) == birnn.load(None)
    assert len({len(words) for words, _ in tagged}) > 20
    assert all(len(words) == len(tags) for words, tags in tagged)
    assert max(max(words) for words in lm.load(None)[0]) < sizes["words"]


def test_data_for_each_model():
    data = ["trees", "lm=sentences"]
    assert [command.folder(name, data) for name in ("treelstm", "lm", "birnn")] == ["trees", "sentences", "trees"]
    assert command.folder("birnn", data[1:]) is None


def test_tapes_of_all_instances_are_recorded_before_anything_is_timed():
    static = session("dynbatch-static", "agenda", mode="infer")
    calls = []
    remember = static.system.program.remember
    static.system.program.remember = lambda instances: (calls.append(instances), remember(instances))
    static.minibatches = Minibatches([*TREES, *[((1, 1), 0)] * 3], 5)
    static.compare()
    assert calls == []
    static.warm_up(0.0)
    assert len(calls) == 1
    assert session("dynbatch", "agenda").warm_up(0.0) is None


def test_steps_of_the_ablation_add_up():
    entries, skipped = ablation.entries(lm)
    assert skipped == {}
    assert [entry.step for entry in entries] == [step.name for step in ablation.STEPS]
    layout = ("layout",)
    assert [entry.without for entry in entries] == [("horizontal fusion", "layout")] * 2 + [layout] * 3 + [()] * 2
    assert [entry.system for entry in entries] == [OWN[2], *[OWN[0]] * 5, OWN[1]]
    assert dict(entries[2].environment) == {"DYNBATCH_COMPILE": "never", "DYNBATCH_BLAS": "numpy"}
    assert dict(entries[-1].environment) == {"DYNBATCH_COMPILE": "hot", "DYNBATCH_BLAS": "own"}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_can_be_left_out(name, monkeypatch):
    module, function, _ = PASSES[name]
    before = getattr(importlib.import_module(module), function)
    monkeypatch.setattr(f"{module}.{function}", before)  # so that it is put back
    Session(Job("treelstm", "dynbatch", "agenda", 8, 5, "infer", TREES, SIZES, without=(name,)))
    assert getattr(importlib.import_module(module), function) is not before
    losses = session("dynbatch", "agenda").compare()[0]
    monkeypatch.setattr(f"{module}.{function}", before)
    np.testing.assert_allclose(losses, session("dynbatch", "agenda").compare()[0], rtol=1e-4)


def test_a_tiny_ablation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(ablation, "STEPS", [ablation.STEPS[0], ablation.STEPS[-1]])
    path = tmp_path / "ablation.json"
    flags = "--ablation --models lm --hidden 8 --batch 2 --mode infer --threads 1 --repeats 2"
    status = command.main([*flags.split(), "--json", str(path), "--report", str(tmp_path)])
    assert status == 0, capsys.readouterr().err
    found = json.loads(path.read_text())
    assert found["rows"] == []
    assert [row["step"] for row in found["ablation"]] == ["DyNet's way", "static replay"]
    assert all(set(row) == KEYS | {"step"} for row in found["ablation"])
    assert "x before" in (tmp_path / "ablation.md").read_text()
    assert "static replay" in capsys.readouterr().out


def test_a_tiny_growth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    for name, value in (("NODES", (100, 400)), ("BATCHES", (1, 2)), ("PROBE", 4)):
        monkeypatch.setattr(growth, name, value)
    path = tmp_path / "growth.json"
    flags = "--growth --models lm --hidden 8 --threads 1 --strategies depth --repeats 2"
    assert command.main([*flags.split(), "--json", str(path), "--report", str(tmp_path)]) == 0, capsys.readouterr().err
    rows = json.loads(path.read_text())["growth"]
    assert [(row["system"], row["against"]) for row in rows] == [
        (system, against) for system in OWN for against in ("nodes", "nodes", "batch size", "batch size")
    ]
    for row in rows:
        assert 0 < row["schedule_us"] < row["total_us"] and row["nodes"] > row["batches"] > 0
    assert rows[1]["nodes"] > 2 * rows[0]["nodes"] and [row["instances"] for row in rows[2:4]] == [1, 2]
    assert (tmp_path / "growth-lm.png").read_bytes().startswith(b"\x89PNG")
    assert "growth-lm.png" in (tmp_path / "growth.md").read_text()


def test_a_fault_of_growth_is_told(monkeypatch, capsys):
    def fails(*_):
        raise WorkerFault("it died")

    monkeypatch.setattr(command, "peak", lambda threads: 1.0)
    monkeypatch.setattr(growth, "measure", fails)
    assert command.main(["--growth", "--models", "lm", "--strategies", "depth"]) == 1
    assert "it died" in capsys.readouterr().err


def test_data_in_brackets(tmp_path):
    (tmp_path / "train.txt").write_text("(3 (2 It) (4 (2 is) (4 lovely)))\n(1 (2 It) (1 hurts))\n")
    instances, sizes = treelstm.load(str(tmp_path))
    assert instances == [((1, (2, 3)), 3), ((1, 4), 1)]
    assert sizes == {"words": 5, "classes": 4}


def test_the_plain_system_has_one_node_for_every_op():
    nodes = {}
    for system in ("dynbatch", "dynbatch-plain"):
        one = session(system, "agenda")
        one.run(one.minibatches[0])
        nodes[system] = one.system.counts()["nodes"]
    leaves, inner = 14, 9
    assert nodes["dynbatch"] == leaves + inner + len(TREES) + 1
    # lookup, three gates of two ops, c and h; five gates, five ops for c and three for h; scores and loss; their sum
    assert nodes["dynbatch-plain"] == leaves * 10 + inner * 17 + len(TREES) * 2 + 1


def test_every_system_is_chosen_with_the_strategies_asked_for():
    chosen = command.chosen_systems(treelstm, [], ["depth"])
    assert [(entry.system, entry.strategy) for entry in chosen] == [(name, "depth") for name in OWN]
    everything = command.chosen_systems(treelstm, ["dynet", "torch"], ["all"])
    assert {entry.system for entry in everything} == set(SYSTEMS)
    assert [entry.strategy for entry in everything if entry.system == "dynet"] == ["agenda", "depth", "off"]
    assert Entry("torch-by-hand", None) in everything


def test_the_threads_are_in_the_environment_and_what_slows_blas_is_not(monkeypatch):
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "512")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    found = measure.environment(3)
    assert "OPENBLAS_L2_SIZE" not in found and "OPENBLAS_CORETYPE" not in found
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        assert found[f"{library}_NUM_THREADS"] == "3"


def test_a_library_that_is_not_installed_is_missing_but_dynbatch_itself_must_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPeer, match="torch"):
        session("torch-by-hand")
    monkeypatch.setattr(Dynbatch, "load", lambda self, strategy: importlib.import_module("no_such_module"))
    with pytest.raises(ModuleNotFoundError):
        session("dynbatch", "agenda")


class Stand:
    """Stands in for a worker: answers at once, and as the system's name says."""

    def __init__(self, name: str, threads: int, variables: tuple) -> None:
        self.name = name

    def send(self, job: Job) -> None:
        self.system = job.system

    def receive(self) -> None:
        if self.system == "dynet":
            raise Missing("No module named 'dynet'")

    def ask(self, method: str, *arguments):
        if method == "compare":
            return [float("nan") if self.system == "torch-by-hand" else 2.0, 3.0], 0.5
        if method == "step" and self.system == "torch-one-by-one" and arguments[0] == 1:
            raise WorkerFault("torch-one-by-one died: exit status 1")
        return {
            "warm_up": None,
            "step": {"run": 0.25, "total": 0.125 * (1 + arguments[0]) if method == "step" else None, "flops": 1e9},
            "finish": {"peak_mib": 100.0, "blas": "openblas", "replay": False},
        }[method]

    def close(self) -> None:
        pass


def test_what_goes_wrong_is_told_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(measure, "Worker", Stand)
    systems = [("dynbatch", "agenda"), ("dynet", "agenda"), ("torch-by-hand", None), ("torch-one-by-one", None)]
    found = measure.measure(SMALL, [Entry(*system) for system in systems], TREES, SIZES, repeats=3, blas_peak=16.0)
    assert found.missing == {"dynet": "No module named 'dynet'"}
    assert ["nan" in fault and "torch-by-hand" in fault for fault in found.faults] == [True, False]
    assert "exit status 1" in found.faults[1]
    (row,) = found.rows
    assert (row["system"], row["total_ms"], row["min_ms"], row["max_ms"]) == ("dynbatch", 250.0, 125.0, 375.0)
    assert (row["first_ms"], row["gflops"], row["blas_share"]) == (500.0, 4.0, 0.25)
    assert row["record_ms"] is row["nodes"] is None


def test_a_worker_that_dies_is_told_with_its_last_words():
    worker = measure.Worker("the worker", 1)
    worker.process.kill()
    with pytest.raises(WorkerFault, match="the worker died: exit status -9"):
        worker.send(Job("treelstm", "dynbatch", "agenda", 8, 5, "infer", TREES, SIZES))
        worker.receive()
    worker.close()


def row(system: str, strategy: str | None, total: float, hidden: int = 64) -> dict:
    empty = dict.fromkeys(KEYS)
    numbers = {"total_ms": total, "min_ms": total - 1, "max_ms": total + 1, "first_ms": 1234.5, "peak_mib": 99.6}
    return empty | vars(Configuration("treelstm", hidden, 64, "infer", 2)) | numbers | {
        "system": system, "strategy": strategy, "gflops": 12.34, "blas_share": 0.5, "bytes_gathered": 2048,
    }  # fmt: skip


ROWS = [row("dynbatch", "agenda", 5.0), row("dynet", "agenda", 30.0), row("dynet", "depth", 20.0)]
ROWS += [row("torch-by-hand", None, 4.0), row("dynbatch", "agenda", 40.0, hidden=512)]


def test_tables():
    text = report.text(report.COLUMNS, report.cells(ROWS[:4])).splitlines()
    assert (
        " ".join(text[0].split())
        == "system strategy total min max x DyNet x PyTorch first KiB gathered MiB GFLOP/s of BLAS"
    )
    assert " ".join(text[1].split()) == "dynbatch agenda 5.00 4.00 6.00 4.00x 0.80x 1,234 2 100 12.3 50%"
    assert len({len(line) for line in text}) == 1
    lines = report.markdown(report.COLUMNS, report.cells(ROWS[:4])).splitlines()
    assert lines[0].startswith("| system | strategy | total |") and lines[1].startswith("| --- | --- | ---: |")
    assert lines[2] == "| dynbatch | agenda | 5.00 | 4.00 | 6.00 | 4.00x | 0.80x | 1,234 | 2 | 100 | 12.3 | 50% |"


def test_headline_compares_the_best_strategies_and_leaves_unknown_ratios_empty():
    assert report.headline([*ROWS, row("dynbatch-static", "depth", 2.5)]) == [
        ["treelstm", "infer", "64", "64", "2", "5.00", "2.50", "20.00", "4.00", "4.00x", "0.80x", "8.00x", "1.60x"],
        ["treelstm", "infer", "512", "64", "2", "40.00", "", "", "", "", "", "", ""],
    ]


def test_the_report_names_the_other_reports(tmp_path):
    known = machine.description() | {"blas_peak_gflops": {1: 2.0}}
    found = {"machine": known, "arguments": [], "missing": {}, "faults": [], "rows": ROWS}
    report.save(tmp_path, found)
    assert "See also" not in (tmp_path / "bench.md").read_text()
    (tmp_path / "growth.md").write_text("")
    report.save(tmp_path, found)
    assert "See also [growth.md](growth.md)." in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        "--models nonsense",
        "--mode sideways",
        "--against tensorflow",
        "--batch 0",
        "--ablation --growth",
        "--json no/such/folder/x.json",
    ],
)
def test_bad_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(flags.split())
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_broken_data_file_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "peak", lambda threads: 1.0)
    (tmp_path / "train.txt").write_text("(3 (2 It)\n")
    assert command.main(["--data", str(tmp_path)]) == 1
    assert "line 1" in capsys.readouterr().err.splitlines()[-1]
