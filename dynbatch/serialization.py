"""Saving and loading of parameters and checkpoints, as safetensors files.

Values lie in a file under their names below the saved collection (``"/encoder/W"``), in the user's shapes, so that
any other reader of safetensors finds them; the optimizer's state under names without the slash in front. The file's
own metadata holds what kind of file it is, the user's metadata, and in a checkpoint the random state, as JSON.

A file appears whole or not at all: it is written next to its place, flushed to the disk and then renamed. Loading
compares everything before it changes anything.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import numpy as np

from dynbatch.config import config
from dynbatch.cpu import products, tiers
from dynbatch.errors import FileFormatError
from dynbatch.lookup_parameters import LookupParameter
from dynbatch.parameters import ParameterCollection
from dynbatch.trainers import Trainer

__all__ = ["load", "load_checkpoint", "load_metadata", "save", "save_checkpoint"]

_FORMAT = "1"
_PARAMETERS = "parameters"
_CHECKPOINT = "checkpoint"

Path = str | os.PathLike[str]


def save(path: Path, collection: ParameterCollection, metadata: dict[str, Any] | None = None) -> None:
    """Write the values of all parameters of a collection to a file, atomically.

    Arguments:
        path: the file; one that is there is replaced.
        collection: what to save, with its subcollections.
        metadata: anything that JSON can hold, such as a vocabulary and hyper-parameters; `load` and `load_metadata`
            give it back (tuples as lists, keys as strings).

    Raises:
        TypeError: JSON cannot hold the metadata.
        OSError: the file cannot be written; a file that was there is then as it was.
    """
    _write(path, _values_of(collection), {"kind": _PARAMETERS, "metadata": _to_json("metadata", metadata)})


def load(path: Path, collection: ParameterCollection, cast: bool = False) -> dict[str, Any]:
    """Set the values of all parameters of a collection from a file that `save` or `save_checkpoint` wrote.

    Arguments:
        path: the file.
        collection: has the same names below it, with the same shapes, as the collection that was saved.
        cast: convert between float32 and float64.

    Returns:
        The metadata.

    Raises:
        FileFormatError: the file is truncated or foreign, or its names, shapes or dtype differ (the differences are
            listed); everything is then as it was.
        OSError: the file cannot be read.
    """
    tensors, header = _read(path)
    values = {name: array for name, array in tensors.items() if name.startswith("/")}
    _refuse(path, _value_differences(values, collection, cast))
    metadata = _from_json(path, header, "metadata")
    _set_values(values, collection)
    return metadata


def load_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a file that `save` or `save_checkpoint` wrote, without reading its values.

    Raises:
        FileFormatError: the file is truncated or foreign.
        OSError: the file cannot be read.
    """
    _, header = _read(path, tensors=False)
    return _from_json(path, header, "metadata")


def save_checkpoint(
    path: Path,
    collection: ParameterCollection,
    trainer: Trainer,
    metadata: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write what training goes on from to a file, atomically: values, optimizer state and random state.

    Save between updates: gradients are not part of it.

    Arguments:
        path, collection, metadata: see `save`.
        trainer: the trainer of the collection.
        state: where the training is, anything that JSON can hold: epoch, order of the instances, best score.

    Raises:
        TypeError: JSON cannot hold the metadata or the state.
        OSError: the file cannot be written; a file that was there is then as it was.
    """
    header = {
        "kind": _CHECKPOINT,
        "metadata": _to_json("metadata", metadata),
        "state": _to_json("state", state),
        "random": json.dumps(_random_state()),
    }
    _write(path, {**_values_of(collection), **trainer.state()}, header)


def load_checkpoint(
    path: Path, collection: ParameterCollection, trainer: Trainer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Go on from a file that `save_checkpoint` wrote; on the same machine, bit-equal to not having stopped.

    The trainer's settings, such as its learning rate, become those of the file. Gradients are cleared.

    Arguments:
        path: the file.
        collection, trainer: made as they were when the checkpoint was saved.

    Returns:
        The metadata and the state that were saved.

    Raises:
        FileFormatError: see `load`; also if it is no checkpoint, or one of another kind of trainer.
        OSError: the file cannot be read.
    """
    tensors, header = _read(path)
    if header["kind"] != _CHECKPOINT:
        raise FileFormatError(f"{os.fspath(path)}: holds parameters only, it is no checkpoint; load it with load()")
    values = {name: array for name, array in tensors.items() if name.startswith("/")}
    optimizer = {name: array for name, array in tensors.items() if not name.startswith("/")}
    _refuse(path, _value_differences(values, collection, cast=False) + trainer.state_differences(optimizer))
    metadata, state = _from_json(path, header, "metadata"), _from_json(path, header, "state")
    random = _from_json(path, header, "random")
    _set_random_state(path, random)
    _set_values(values, collection)
    trainer.load_state(optimizer)
    collection.reset_gradient()
    return metadata, state


# Values


def _values_of(collection: ParameterCollection) -> dict[str, np.ndarray]:
    return {name: parameter.as_array() for name, parameter in collection.named_parameters().items()}


def _value_differences(values: dict[str, np.ndarray], collection: ParameterCollection, cast: bool) -> list[str]:
    parameters = collection.named_parameters()
    lines = [f"{name}: not in the file" for name in parameters if name not in values]
    lines += [
        f"{name}: in the file only, shape {array.shape}" for name, array in values.items() if name not in parameters
    ]
    for name, parameter in parameters.items():
        if name not in values:
            continue
        array, dtype = values[name], parameter.type.dtype
        if array.shape != parameter.shape:
            lines.append(f"{name}: shape {array.shape} in the file, {parameter.shape} here")
        if array.dtype != dtype and not (cast and array.dtype.kind == "f"):
            lines.append(f"{name}: {array.dtype} in the file, {dtype} here (load with cast=True to convert)")
    return lines


def _set_values(values: dict[str, np.ndarray], collection: ParameterCollection) -> None:
    for name, parameter in collection.named_parameters().items():
        if isinstance(parameter, LookupParameter):
            parameter.init_from_array(values[name])
        else:
            parameter.set_value(values[name])


# Random state


def _random_state() -> dict[str, Any]:
    generator = config.generator.bit_generator.state
    # what has been compiled is part of it, and who multiplies: they round differently, and resuming is to be bit-equal
    return {
        "seed": config.seed,
        "entropy": config.entropy,
        "draws": config.draws,
        "generator": generator,
        "tiers": dict(tiers.counts),
        "products": products.state(),
    }


def _set_random_state(path: Path, state: dict[str, Any]) -> None:
    try:
        # Tried on a generator of its own, so that a bad state changes nothing.
        trial = np.random.default_rng()
        trial.bit_generator.state = state["generator"]
        seed, entropy, draws = state["seed"], int(state["entropy"]), int(state["draws"])
        counts = {str(name): int(count) for name, count in state["tiers"].items()}
        chosen = {str(question): str(answer) for question, answer in state["products"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{os.fspath(path)}: its random state cannot be used: {error!r}") from None
    config.seed = seed
    config.entropy = entropy
    config.draws = draws
    config.generator.bit_generator.state = trial.bit_generator.state
    tiers.counts.clear()
    tiers.counts.update(counts)
    products.set_state(chosen)


# Files


def _write(path: Path, tensors: dict[str, np.ndarray], header: dict[str, str]) -> None:
    from safetensors.numpy import save as to_bytes

    content = to_bytes(tensors, {"dynbatch": _FORMAT, **header})
    # A link stays a link: what it points to is replaced.
    target = os.path.realpath(path)
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    # The new name is on the disk only once the folder is.
    folder = os.open(os.path.dirname(target), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    name = os.fspath(path)
    with open(path, "rb"):  # the system's own error where the file is missing, a folder or not ours to read
        pass
    try:
        with safe_open(name, framework="numpy") as file:
            header = file.metadata() or {}
            names = file.keys() if tensors else []
            found = {key: file.get_tensor(key) for key in names}
    except SafetensorError as error:
        raise FileFormatError(f"{name}: truncated, or no safetensors file: {error}") from None
    if header.get("dynbatch") != _FORMAT or header.get("kind") not in (_PARAMETERS, _CHECKPOINT):
        raise FileFormatError(f"{name}: a safetensors file, but not one that this version of dynbatch has written")
    return found, header


def _refuse(path: Path, differences: list[str]) -> None:
    if differences:
        listed = "\n  ".join(differences)
        raise FileFormatError(f"{os.fspath(path)} does not fit, and nothing was changed:\n  {listed}")


def _to_json(what: str, content: dict[str, Any] | None) -> str:
    try:
        return json.dumps({} if content is None else content)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be what JSON can hold: {error}") from None


def _from_json(path: Path, header: dict[str, str], key: str) -> dict[str, Any]:
    try:
        return json.loads(header[key])
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{os.fspath(path)}: its {key} cannot be read: {error!r}") from None
