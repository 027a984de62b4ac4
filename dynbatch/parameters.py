"""Parameters, and the collections that own them.

All dense parameters of a collection and its subcollections lie in one flat value buffer and, from the first
gradient on, one flat gradient buffer, so that a trainer runs one kernel over everything. Lookup tables have
buffers of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.buffers import FlatBuffers, memory_for, of_shape
from dynbatch.config import check_device, config
from dynbatch.constant_parameters import ConstantParameter
from dynbatch.errors import CellError, ConfigurationError, ShapeError, user_line
from dynbatch.graph import Operand, state
from dynbatch.initializers import initializer_from
from dynbatch.lookup_parameters import LookupParameter
from dynbatch.types import Type, type_of

if TYPE_CHECKING:
    from dynbatch.cuda.driver import Driver


class ParameterCollection:
    """Parameters that are trained and saved together, and the subcollections that group them.

    ```python
    pc = dy.ParameterCollection()
    W = pc.add_parameters((100, 200), name="W")
    words = pc.add_lookup_parameters((10_000, 200), name="words")
    ```

    Arguments:
        name: part of the full names of the parameters; a collection without one is ``"/"``.

    Attributes:
        name: the full name, with a slash at both ends.
        root: the collection at the top, which may be this one.
        weight_decay_lambda: see `set_weight_decay_lambda`.
    """

    def __init__(self, name: str = "") -> None:
        _check_name(name)
        self.name = f"/{name}/" if name else "/"
        self.root = self
        self.weight_decay_lambda = 0.0
        self._buffers = FlatBuffers()
        self._parent: ParameterCollection | None = None
        self._parameters: list[Parameter] = []
        self._lookup_parameters: list[LookupParameter] = []
        self._parameter_names: set[str] = set()
        self._collection_names: set[str] = set()
        self._segments: dict[bool, tuple[int, np.ndarray, np.ndarray]] = {}

    def __repr__(self) -> str:
        return f"ParameterCollection {self.name} ({self.parameter_count()} values)"

    # Adding

    def add_parameters(
        self,
        dim: int | Sequence[int],
        init: Any = None,
        name: str = "",
        update: bool = True,
        *,
        scale: float = 1.0,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> Parameter:
        """Add a parameter.

        Arguments:
            dim: the shape.
            init: initial values: None (Glorot), an initializer, a number, an array, or a name; see
                `dynbatch.initializers.initializer_from`, which also takes ``scale``, ``mean`` and ``std``.
            name: last part of the full name. One that is taken gets ``_1``, ``_2``, ... appended; without one it
                is ``_0``, ``_1``, ...
            update: False for a parameter that trainers leave alone.

        Raises:
            ShapeError: a dimension that is not a positive integer, or initial values of another shape.
            ConfigurationError: an unknown initializer, or a name with a slash.
            OutOfMemoryError: the values do not fit in memory.
        """
        _check_name(name)
        short = _free_name(name, self._parameter_names)
        full = self.name + short
        dtype = self.dtype
        type_ = _type_of(full, dim, dtype)
        values = _initial_values(full, init, type_.shape, dtype, False, (scale, mean, std))
        with memory_for(full, type_.shape, dtype):
            parameter = Parameter(self, full, type_, update)
            self._buffers.append(parameter, values)
        self._parameter_names.add(short)
        for collection in self._and_parents():
            collection._parameters.append(parameter)
        return parameter

    def add_lookup_parameters(
        self,
        dim: Sequence[Any],
        init: Any = None,
        name: str = "",
        update: bool = True,
        *,
        scale: float = 1.0,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> LookupParameter:
        """Add a lookup table.

        Arguments:
            dim: ``(V, d)`` for V vectors of d elements; ``(V, d1, d2)`` or ``(V, (d1, d2))`` for V matrices.
            init: see `add_parameters`; an array has the shape ``(V, *row shape)``.
            name: see `add_parameters`.
            update: False for a table that trainers leave alone.

        Raises:
            ShapeError, ConfigurationError, OutOfMemoryError: see `add_parameters`.
        """
        _check_name(name)
        short = _free_name(name, self._parameter_names)
        full = self.name + short
        dtype = self.dtype
        dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
        if len(dims) == 2 and isinstance(dims[1], Sequence):
            dims = (dims[0], *dims[1])
        size, *row = _type_of(full, dims, dtype).shape
        row_type = type_of(tuple(row), dtype)
        shape = (size, *row_type.shape)
        values = _initial_values(full, init, shape, dtype, True, (scale, mean, std))
        with memory_for(full, shape, dtype):
            parameter = LookupParameter(self, full, row_type, size, values, update)
        self._parameter_names.add(short)
        for collection in self._and_parents():
            collection._lookup_parameters.append(parameter)
        return parameter

    def add_subcollection(self, name: str = "") -> ParameterCollection:
        """Add a collection inside this one. Its parameters belong to both, and lie in the root's buffers.

        Arguments:
            name: last part of its full name; one that is taken, or none, is numbered as in `add_parameters`.
        """
        _check_name(name)
        short = _free_name(name, self._collection_names)
        child = ParameterCollection()
        child.name = f"{self.name}{short}/"
        child.root = self.root
        child.weight_decay_lambda = self.weight_decay_lambda
        child._buffers = self._buffers
        child._parent = self
        self._collection_names.add(short)
        return child

    # Asking

    def parameters_list(self) -> list[Parameter]:
        """The dense parameters of this collection and its subcollections, in the order they were added."""
        return list(self._parameters)

    def lookup_parameters_list(self) -> list[LookupParameter]:
        """The lookup tables of this collection and its subcollections, in the order they were added."""
        return list(self._lookup_parameters)

    def named_parameters(self) -> dict[str, Parameter | LookupParameter]:
        """All parameters and tables by their names below this collection, such as ``"/W"`` and ``"/encoder/W"``.

        Of the root these are the full names. What is saved from one collection can be loaded into another that
        has the same names below it.
        """
        start = len(self.name) - 1
        everything: list[Parameter | LookupParameter] = [*self._parameters, *self._lookup_parameters]
        return {p.name[start:]: p for p in everything}

    def parameter_count(self) -> int:
        """How many numbers all parameters and lookup tables hold together."""
        dense = sum(p.type.size for p in self._parameters)
        return dense + sum(p.size * p.type.size for p in self._lookup_parameters)

    @property
    def dtype(self) -> np.dtype:
        """Type of all values: what `dynbatch.init` says when the first parameter is added, fixed from then on."""
        return self._buffers.dtype or np.dtype(config.dtype)

    @property
    def version(self) -> int:
        """Grows whenever a value of any parameter under the same root changes; blocks derived from values key on it."""
        return self._buffers.version

    @property
    def state(self) -> tuple[int, int]:
        """The version, and a number that changes when parameters are added (which may move the others)."""
        return self._buffers.version, self._buffers.layout

    def mark_changed(self) -> None:
        """Say that values were written through `Parameter.data`; every other way to change them says so itself."""
        self._buffers.changed()
        for table in self.root.lookup_parameters_list():
            table.mark_written()

    @property
    def device(self) -> str:
        """Where the parameters under the same root are used: ``"cpu"``, ``"cuda:0"``, ...; see `to`."""
        return self._buffers.device

    def to(self, device: str) -> ParameterCollection:
        """Move all parameters under the same root, their gradients, and what trainers hold of them, to a device.

        At first they are where `dynbatch.init` says. Files know no device: what was saved on one loads on another.

        Arguments:
            device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

        Returns:
            This collection.

        Raises:
            ConfigurationError: no name of a device.
            DeviceError: the device cannot be used; it says why. Nothing was moved.
        """
        name = check_device(device)
        if name != self._buffers.device:
            self._buffers.leave()
            for table in self.root.lookup_parameters_list():
                table.leave_device()
            self._buffers.device = name
            self._buffers.layout += 1
        return self

    @property
    def dense_values(self) -> np.ndarray:
        """The root's flat value buffer, shared by all dense parameters under it. Moves when a parameter is added.

        A parameter's values start at its ``offset``; up to 63 bytes between parameters are zero padding. On a device
        this is a copy: to be asked for anew after each update.
        """
        self._buffers.fetch()
        return self._buffers.values

    def flat(self) -> tuple[Any, Any]:
        """Values and gradients under the same root as trainers' kernels take them, on the device where they are."""
        if self.device == "cpu":
            return self.dense_values, self.dense_gradients
        from dynbatch.cuda.devices import driver

        there = driver(self.device)
        return self._buffers.values_on(there), self._buffers.gradients_on(there)

    @property
    def buffers(self) -> FlatBuffers:
        """The memory under the same root."""
        return self._buffers

    @property
    def dense_gradients(self) -> np.ndarray:
        """The root's flat gradient buffer, laid out as `dense_values`; zeros until a gradient is added."""
        return self._buffers.writable_gradients()

    def dense_segments(self, update: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Where this collection's dense parameters lie in `dense_values`: starts and stops, two int64 arrays.

        Arguments:
            update: list the parameters that are updated, or (False) those that are not.
        """
        cached = self._segments.get(update)
        if cached is None or cached[0] != self._buffers.layout:
            chosen = [p for p in self._parameters if p.update == update]
            starts = np.array([p.offset for p in chosen], dtype=np.int64)
            stops = np.array([p.offset + p.type.size for p in chosen], dtype=np.int64)
            cached = self._segments[update] = (self._buffers.layout, starts, stops)
        return cached[1], cached[2]

    # Training

    def reset_gradient(self) -> None:
        """Drop the gradients that were accumulated since the last update."""
        for parameter in self._parameters:
            self._buffers.clear_gradients(parameter.offset, parameter.offset + parameter.type.size)
        for table in self._lookup_parameters:
            table.clear_gradient()

    def set_weight_decay_lambda(self, lam: float) -> None:
        """Let each update of a trainer on this collection end by multiplying all its values by ``1 - lam``.

        That is all but the parameters with ``update=False``, and also the rows of lookup tables that got no gradient:
        with a decay, every update passes over the whole of every table. Independent of the learning rate, as in DyNet.
        0, the default, is none. A subcollection that is added later starts with the same.

        Raises:
            ConfigurationError: ``lam`` is not in [0, 1).
        """
        if not 0 <= lam < 1:
            raise ConfigurationError(f"the weight decay must be at least 0 and less than 1, not {lam}")
        self.weight_decay_lambda = float(lam)

    def get_weight_decay(self) -> float:
        """The weight decay in use; see `set_weight_decay_lambda`."""
        return self.weight_decay_lambda

    # Saving

    def save(self, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None) -> None:
        """Write all values to a file; see `dynbatch.serialization.save`."""
        from dynbatch.serialization import save

        save(path, self, metadata)

    def populate(self, path: str | os.PathLike[str], cast: bool = False) -> dict[str, Any]:
        """Read all values from a file, and return its metadata; see `dynbatch.serialization.load`."""
        from dynbatch.serialization import load

        return load(path, self, cast)

    def _and_parents(self) -> Iterator[ParameterCollection]:
        collection: ParameterCollection | None = self
        while collection is not None:
            yield collection
            collection = collection._parent


class Parameter(Operand):
    """A dense parameter: use it in expressions; made by `ParameterCollection.add_parameters`.

    Attributes:
        type: shape and dtype of the value.
        shape: the user's shape.
        name: full name, such as ``"/encoder/W"``.
        collection: where it was added; ``root`` is the collection at the top of that.
        offset: where its values start in ``root.dense_values``.
        key: the parameter itself, which is what the op tables are searched by.
        table: the core's cache of what it has found out about this parameter.
    """

    is_parameter = True
    graph = None

    def __init__(self, collection: ParameterCollection, name: str, type_: Type, update: bool) -> None:
        self.collection = collection
        self.root = collection.root
        self.name = name
        self.type = type_
        self.key = self
        self.shape = type_.shape
        self.table: dict[Any, Any] = {}
        self.offset = 0
        self._buffers = collection._buffers
        self._update = bool(update)
        self._data = self._buffers.values
        self._grad: np.ndarray | None = None
        self._constant: ConstantParameter | None = None

    def __repr__(self) -> str:
        return f"Parameter {self.name} {self.shape}"

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the views, which a copy finds in buffers of its own, and without what the core cached."""
        return self.__dict__ | {"table": {}, "_data": None, "_grad": None}

    def __setstate__(self, found: dict[str, Any]) -> None:
        self.__dict__.update(found)
        if self._buffers.__dict__:  # else they are being copied too, and will tell the parameters then
            self.locate()

    @property
    def constant(self) -> ConstantParameter:
        """The parameter as a constant, always the same object; no gradient comes from where it is used."""
        if self._constant is None:
            self._constant = ConstantParameter(self)
        return self._constant

    @property
    def data(self) -> np.ndarray:
        """The values, a view in storage order (shape ``type.storage``); stale once another parameter is added.

        After writing to it call `ParameterCollection.mark_changed`. On a device this is a copy: to be asked for anew
        after each update.
        """
        if self._buffers.values_copy is not None:
            self._buffers.values_copy.fetch()
        return self._data

    @property
    def grad(self) -> np.ndarray:
        """The gradient, a view like `data`."""
        self._buffers.writable_gradients()
        return self._grad  # type: ignore[return-value]

    def device_values(self, driver: Driver) -> int:
        """Address of the values on a device."""
        return self._buffers.values_on(driver).address + self.offset * self.type.dtype.itemsize

    def device_gradient(self, driver: Driver) -> int:
        """Address of the gradient on a device, where it is going to be written."""
        return self._buffers.gradients_on(driver).target + self.offset * self.type.dtype.itemsize

    @property
    def update(self) -> bool:
        """Whether trainers change it."""
        return self._update

    @update.setter
    def update(self, update: bool) -> None:
        self._update = bool(update)
        self._buffers.layout += 1

    def set_updated(self, update: bool) -> None:
        """DyNet's way to set `update`."""
        self.update = update

    def is_updated(self) -> bool:
        """DyNet's way to read `update`."""
        return self._update

    def as_array(self) -> np.ndarray:
        """A copy of the values, of shape ``shape``."""
        return np.array(self.data.T, order="C")

    def npvalue(self, recalculate: bool = False) -> np.ndarray:
        """What `as_array` returns: a parameter is an operand whose value needs no computing."""
        if state.tracer is not None:
            raise CellError(
                f"{user_line()}: cell {state.tracer.name} reads the value of {self.name}; pass it to the cell"
            )
        return self.as_array()

    def grad_as_array(self) -> np.ndarray:
        """A copy of the gradient, of shape ``shape``; zeros where nothing was added since the last update."""
        return np.array(self.grad.T, order="C")

    def set_value(self, array: Any) -> None:
        """Set the values from an array of shape ``shape``.

        Raises:
            ShapeError: another shape; names the parameter and both shapes.
        """
        self.data[...] = of_shape(self.name, array, self.shape).T
        self._buffers.changed()

    def zero(self) -> None:
        """Set the values and the gradient to zero."""
        self.data[...] = 0
        if self._grad is not None:
            self.grad[...] = 0
        self._buffers.changed()

    def scale(self, a: float) -> None:
        """Multiply the values by a number."""
        self.data[...] *= a
        self._buffers.changed()

    def scale_gradient(self, a: float) -> None:
        """Multiply the gradient by a number."""
        grad = self.grad
        grad *= a

    def locate(self) -> None:
        """Take new views after the buffers moved."""
        stop = self.offset + self.type.size
        self._data = self._buffers.values[self.offset : stop].reshape(self.type.storage)
        if self._buffers.gradients is not None:
            self._grad = self._buffers.gradients[self.offset : stop].reshape(self.type.storage)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or "/" in name:
        raise ConfigurationError(f"a name is a string without a slash, which {name!r} is not")


def _free_name(name: str, taken: set[str]) -> str:
    """``name``, or with the first free number appended, as DyNet does; numbered from 0 where ``name`` is empty."""
    if name and name not in taken:
        return name
    number = 1 if name else 0
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _type_of(name: str, dim: Any, dtype: np.dtype) -> Type:
    try:
        dims = (index(dim),) if not isinstance(dim, Sequence) else tuple(index(d) for d in dim)
    except TypeError:
        raise ShapeError(f"{name}: a shape is an integer or a tuple of integers, not {dim!r}") from None
    if not dims or min(dims) <= 0:
        raise ShapeError(f"{name}: a shape needs positive dimensions, not {dim!r}")
    return type_of(dims, dtype)


def _initial_values(
    name: str, init: Any, shape: tuple[int, ...], dtype: np.dtype, lookup: bool, arguments: tuple[float, float, float]
) -> np.ndarray:
    with memory_for(name, shape, np.dtype(np.float64)):
        try:
            values = initializer_from(init, *arguments).values(shape, config.generator, lookup)
        except ShapeError as error:
            raise ShapeError(f"{name}: {error}") from None
        return np.asarray(values, dtype=dtype)
