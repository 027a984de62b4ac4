"""Saving and loading: what comes back, what is refused, and that nothing is lost on the way."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynbatch import trainers
from dynbatch.config import config
from dynbatch.cpu import products
from dynbatch.errors import FileFormatError
from dynbatch.parameters import ParameterCollection
from dynbatch.serialization import load, load_checkpoint, load_metadata, save, save_checkpoint

METADATA = {"vocabulary": ["the", "straße", '"quoted"\n'], "hidden": 256, "rate": 0.1, "nested": {"none": None}}


def model(seed: int = 0, vocabulary: int = 6) -> ParameterCollection:
    """A collection with parameters of several kinds, all of different values."""
    generator = np.random.default_rng(seed)
    pc = ParameterCollection()
    pc.add_parameters((5, 3), init=generator.standard_normal((5, 3)), name="W")
    sub = pc.add_subcollection("encoder")
    sub.add_parameters(7, init=generator.standard_normal(7), name="b")
    sub.add_parameters((2, 3, 4), init=generator.standard_normal((2, 3, 4)))
    shape = (vocabulary, 2, 3)
    sub.add_lookup_parameters(shape, init=generator.standard_normal(shape), name="words")
    return pc


def values(pc: ParameterCollection) -> dict[str, np.ndarray]:
    return {name: p.as_array() for name, p in pc.named_parameters().items()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def train(trainer: trainers.Trainer, steps: range) -> None:
    for step in steps:
        for p in trainer.collection.parameters_list():
            p.grad[...] = np.sin(np.arange(p.type.size) + step).reshape(p.grad.shape)
        for table in trainer.collection.lookup_parameters_list():
            table.add_gradient(np.array([step % table.size]), np.full((1, *table.type.storage), 0.1 * step))
        trainer.update()


# Parameters


def test_values_and_metadata_come_back(tmp_path: Path) -> None:
    pc, other = model(0), model(1)
    pc.save(tmp_path / "model.safetensors", METADATA)
    version = other.version
    assert other.populate(tmp_path / "model.safetensors") == METADATA
    assert_equal(values(other), values(pc))
    assert other.version > version
    assert load_metadata(str(tmp_path / "model.safetensors")) == METADATA


def test_metadata_is_optional_and_paths_may_be_strings(tmp_path: Path) -> None:
    save(str(tmp_path / "model"), model(0))
    assert load(str(tmp_path / "model"), model(1)) == load_metadata(str(tmp_path / "model")) == {}


def test_an_empty_collection_can_be_saved(tmp_path: Path) -> None:
    save(tmp_path / "model", ParameterCollection(), METADATA)
    assert load(tmp_path / "model", ParameterCollection()) == METADATA


def test_other_readers_find_names_and_shapes(tmp_path: Path) -> None:
    pc = model()
    save(tmp_path / "model", pc)
    found = load_file(tmp_path / "model")
    assert set(found) == {"/W", "/encoder/b", "/encoder/_0", "/encoder/words"}
    assert_equal(found, values(pc))


def test_a_subcollection_can_be_loaded_into_another_place(tmp_path: Path) -> None:
    outer = ParameterCollection("outer")
    first, second = outer.add_subcollection("a"), outer.add_subcollection("b")
    source, target = first.add_parameters((2, 3), name="W"), second.add_parameters((2, 3), name="W")
    save(tmp_path / "part", first)
    load(tmp_path / "part", second)
    np.testing.assert_array_equal(source.as_array(), target.as_array())
    alone = ParameterCollection()
    alone.add_parameters((2, 3), init=0.0, name="W")
    load(tmp_path / "part", alone)
    np.testing.assert_array_equal(alone.parameters_list()[0].as_array(), source.as_array())


def test_names_and_shapes_that_differ_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    save(tmp_path / "model", model(0, vocabulary=9))
    other = model(1)
    other.add_parameters(4, name="extra")
    before, version = values(other), other.version
    with pytest.raises(FileFormatError) as caught:
        load(tmp_path / "model", other)
    text = str(caught.value)
    assert str(tmp_path / "model") in text
    assert "/encoder/words: shape (9, 2, 3) in the file, (6, 2, 3) here" in text
    assert "/extra: not in the file" in text
    assert "/W" not in text, "what fits is not listed"
    assert_equal(values(other), before)
    assert other.version == version
    with pytest.raises(FileFormatError, match=r"/encoder/b: in the file only, shape \(7,\)"):
        load(tmp_path / "model", ParameterCollection())


def test_another_dtype_is_refused_unless_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = model(0)
    save(tmp_path / "single", single, METADATA)
    monkeypatch.setattr(config, "dtype", "float64")
    double = model(1)
    before = values(double)
    with pytest.raises(FileFormatError, match=r"/W: float32 in the file, float64 here.*cast=True"):
        load(tmp_path / "single", double)
    assert_equal(values(double), before)
    assert double.populate(tmp_path / "single", cast=True) == METADATA
    assert_equal(values(double), values(single))
    save(tmp_path / "double", model(2))
    load(tmp_path / "double", single, cast=True)
    assert_equal(values(single), {name: array.astype(np.float32) for name, array in values(model(2)).items()})


# Files that are not what they should be


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "header cut":
        path.write_bytes(content[:20])
    elif how == "values cut":
        path.write_bytes(content[:-5])
    elif how == "text":
        path.write_text("epoch,loss\n1,0.5\n" * 100)
    elif how == "longer":
        path.write_bytes(content + b"more")
    elif how == "another program's":
        save_file({"/W": np.zeros((5, 3), dtype=np.float32)}, path, {"format": "pt"})
    elif how == "no metadata":
        save_file({"/W": np.zeros((5, 3), dtype=np.float32)}, path)
    elif how == "a later format":
        save_file({"/W": np.zeros((5, 3), dtype=np.float32)}, path, {"dynbatch": "2", "kind": "parameters"})
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    ["empty", "header cut", "values cut", "longer", "text", "another program's", "no metadata", "a later format"],
)
def test_truncated_and_foreign_files_are_named(tmp_path: Path, how: str) -> None:
    path = tmp_path / "model.safetensors"
    pc = model(0)
    trainer = trainers.AdamTrainer(pc)
    save_checkpoint(path, pc, trainer)
    damaged(path, how)
    before, random = values(pc), config.generator.bit_generator.state
    for read in (lambda: load(path, pc), lambda: load_metadata(path), lambda: load_checkpoint(path, pc, trainer)):
        with pytest.raises(FileFormatError, match=r"model\.safetensors"):
            read()
    assert_equal(values(pc), before)
    assert config.generator.bit_generator.state == random


def test_missing_files_and_folders_are_the_systems_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent", model())
    with pytest.raises(IsADirectoryError):
        load(tmp_path, model())
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "absent" / "model", model())
    with pytest.raises(IsADirectoryError):
        save(tmp_path, model())
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob("*.tmp"))


@pytest.mark.parametrize("metadata", [{"a": np.float32(1)}, {"a": {1, 2}}, {"a": object()}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    pc = model()
    with pytest.raises(TypeError, match="metadata must be what JSON can hold"):
        save(tmp_path / "model", pc, metadata)
    with pytest.raises(TypeError, match="state must be what JSON can hold"):
        save_checkpoint(tmp_path / "model", pc, trainers.AdamTrainer(pc), {}, metadata)
    assert not list(tmp_path.iterdir())


# Writing


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "model"
    save(path, model(0), {"which": "old"})
    content = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="disk full"):
            save(path, model(1), {"which": "new"})
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_file_is_readable_by_whom_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save(tmp_path / "model", model())
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o644


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run" / "model")
    pc = model()
    save(tmp_path / "latest", pc)
    assert (tmp_path / "latest").is_symlink()
    other = model(1)
    load(tmp_path / "run" / "model", other)
    assert_equal(values(other), values(pc))


# Checkpoints


@pytest.mark.parametrize(
    "rule",
    ["SimpleSGDTrainer", "MomentumSGDTrainer", "AdagradTrainer", "RMSPropTrainer", "AdamTrainer", "AmsgradTrainer"],
)
def test_training_goes_on_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    for attribute in ("_entropy", "_generator", "draws", "seed"):
        monkeypatch.setattr(config, attribute, getattr(config, attribute))
    config.entropy = 5
    pc = model(0)
    pc.set_weight_decay_lambda(0.001)
    trainer = getattr(trainers, rule)(pc)
    train(trainer, range(5))
    trainer.learning_rate *= 0.7
    config.generator.standard_normal(3)
    config.next_key()
    state = {"epoch": 3, "order": [2, 0, 1], "best": 0.4375}
    save_checkpoint(tmp_path / "checkpoint", pc, trainer, METADATA, state)
    train(trainer, range(5, 9))
    drawn = config.generator.standard_normal(4), config.next_key(), config.draws

    config.entropy = 6
    config.draws = 100
    other = model(1)
    other.set_weight_decay_lambda(0.001)
    resumed = getattr(trainers, rule)(other)
    other.parameters_list()[0].grad[...] = 1.0
    assert load_checkpoint(tmp_path / "checkpoint", other, resumed) == (METADATA, state)
    assert not other.parameters_list()[0].grad_as_array().any()
    train(resumed, range(5, 9))
    assert_equal(values(other), values(pc))
    assert_equal(resumed.state(), trainer.state())
    np.testing.assert_array_equal(config.generator.standard_normal(4), drawn[0])
    assert (config.next_key(), config.draws) == drawn[1:]
    assert config.entropy == 5


RESUME = """
import sys
import numpy as np
sys.path[:0] = sys.argv[3:]
from test_serialization import model, train, values
from dynbatch import trainers
from dynbatch.serialization import load_checkpoint, save
pc = model(1)
trainer = trainers.AdamTrainer(pc)
load_checkpoint(sys.argv[1], pc, trainer)
train(trainer, range(5, 9))
save(sys.argv[2], pc)
"""


def test_another_process_goes_on_bit_equal(tmp_path: Path) -> None:
    pc = model(0)
    trainer = trainers.AdamTrainer(pc)
    train(trainer, range(5))
    save_checkpoint(tmp_path / "checkpoint", pc, trainer)
    here = str(Path(__file__).parent)
    arguments = [tmp_path / "checkpoint", tmp_path / "resumed", here, str(Path(here).parent)]
    subprocess.run([sys.executable, "-c", RESUME, *arguments], check=True)
    train(trainer, range(5, 9))
    assert_equal(load_file(tmp_path / "resumed"), values(pc))


def test_a_checkpoint_carries_who_multiplies(tmp_path: Path) -> None:
    """Libraries round differently; what was measured when the run began is not measured again."""
    known = products.state()
    try:
        pc = model(0)
        trainer = trainers.AdamTrainer(pc)
        products.set_state({"BLAS": "numpy", "float32 3x4, 16 rows": "own"})
        save_checkpoint(tmp_path / "checkpoint", pc, trainer)
        products.set_state({"BLAS": "mkl"})
        load_checkpoint(tmp_path / "checkpoint", pc, trainer)
        assert products.state() == {"BLAS": "numpy", "float32 3x4, 16 rows": "own"}
    finally:
        products.set_state(known)


def test_a_checkpoint_can_be_loaded_as_a_model_but_not_the_other_way(tmp_path: Path) -> None:
    pc = model(0)
    trainer = trainers.AdamTrainer(pc)
    save_checkpoint(tmp_path / "checkpoint", pc, trainer, METADATA)
    other = model(1)
    assert load(tmp_path / "checkpoint", other) == load_metadata(tmp_path / "checkpoint") == METADATA
    assert_equal(values(other), values(pc))
    save(tmp_path / "model", pc)
    with pytest.raises(FileFormatError, match="model: holds parameters only"):
        load_checkpoint(tmp_path / "model", pc, trainer)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    pc = model(0)
    train(trainer := trainers.AdamTrainer(pc), range(2))
    path = tmp_path / "checkpoint"
    save_checkpoint(path, pc, trainer, METADATA)
    same, wider = model(1), model(1, vocabulary=8)
    adagrad, adam = trainers.AdagradTrainer(same), trainers.AdamTrainer(wider)
    before = values(same), values(wider), adagrad.state(), adam.state(), config.draws, config.entropy
    random = config.generator.bit_generator.state
    with pytest.raises(FileFormatError, match=r"AdamTrainer\.mean/W: not used by this trainer"):
        load_checkpoint(path, same, adagrad)
    with pytest.raises(FileFormatError, match=r"/encoder/words: shape \(6, 2, 3\) in the file, \(8, 2, 3\) here"):
        load_checkpoint(path, wider, adam)
    tensors = load_file(path)
    header = {"dynbatch": "1", "kind": "checkpoint", "metadata": "{}", "state": "{}"}
    for random_state in (
        "{}",
        "not JSON",
        json.dumps({"seed": 1, "entropy": 1, "draws": 1, "generator": {"bit_generator": "?"}}),
        json.dumps({"seed": 1, "entropy": 1, "draws": 1, "generator": random, "tiers": {}, "products": ["own"]}),
    ):
        save_file(tensors, path, {**header, "random": random_state})
        with pytest.raises(FileFormatError, match="checkpoint: its random"):
            load_checkpoint(path, same, trainers.AdamTrainer(same))
    after = values(same), values(wider), adagrad.state(), adam.state(), config.draws, config.entropy
    for now, then in zip(after[:4], before[:4], strict=True):
        assert_equal(now, then)
    assert after[4:] == before[4:]
    assert config.generator.bit_generator.state == random
