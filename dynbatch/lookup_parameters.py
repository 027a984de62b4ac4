"""Lookup tables: rows of values chosen by index, with a sparse gradient that lists the rows it touches."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.buffers import aligned_zeros, of_shape
from dynbatch.constant_parameters import ConstantParameter
from dynbatch.errors import IndexRangeError, ShapeError
from dynbatch.types import Type

if TYPE_CHECKING:
    from dynbatch.cuda.copies import DeviceCopy
    from dynbatch.cuda.driver import Driver
    from dynbatch.parameters import ParameterCollection


class LookupParameter:
    """A table of V rows with a sparse gradient; made by `ParameterCollection.add_lookup_parameters`.

    ``table[i]`` is the expression ``dynbatch.lookup(table, i)``.

    Attributes:
        type: shape and dtype of one row.
        size: V, the number of rows.
        shape: ``(V, *row shape)``.
        name, collection, root, key, table: as of `Parameter`.
        update: whether trainers change it.
        lookup_signature: the core's cache of the signature of a lookup.
    """

    is_parameter = True
    is_lookup = True

    def __init__(
        self,
        collection: ParameterCollection,
        name: str,
        row_type: Type,
        size: int,
        values: np.ndarray,
        update: bool,
    ) -> None:
        self.collection = collection
        self.root = collection.root
        self.name = name
        self.type = row_type
        self.key = self
        self.size = size
        self.shape = (size, *row_type.shape)
        self.table: dict[Any, Any] = {}
        self.lookup_signature: Any = None
        self.update = bool(update)
        self._buffers = collection._buffers
        self._data = aligned_zeros(size * row_type.size, row_type.dtype).reshape(size, *row_type.storage)
        self._data[...] = _rows_transposed(values)
        self._values_copy: DeviceCopy | None = None
        self._gradient_copy: DeviceCopy | None = None
        self._gradient: np.ndarray | None = None
        self._is_touched = np.zeros(0, dtype=np.bool_)
        self._touched = np.empty(0, dtype=np.int64)
        self._touched_count = 0
        self._constant: ConstantParameter | None = None
        self._buffers.fix_dtype(row_type.dtype)

    def __repr__(self) -> str:
        return f"LookupParameter {self.name} {self.shape}"

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what the core cached, and what is on a device."""
        self._fetch()
        without: dict[str, Any] = {"table": {}, "lookup_signature": None, "_values_copy": None, "_gradient_copy": None}
        return self.__dict__ | without

    def __getitem__(self, i: int) -> Any:
        from dynbatch.functions import lookup

        return lookup(self, i)

    @property
    def constant(self) -> ConstantParameter:
        """The table as a constant, always the same object; no gradient comes from where it is used."""
        if self._constant is None:
            self._constant = ConstantParameter(self)
        return self._constant

    def set_updated(self, update: bool) -> None:
        """DyNet's way to set `update`."""
        self.update = bool(update)

    def is_updated(self) -> bool:
        """DyNet's way to read `update`."""
        return self.update

    # Values

    @property
    def data(self) -> np.ndarray:
        """The values, an array of shape ``(V, *type.storage)``; after writing call `ParameterCollection.mark_changed`.

        On a device this is a copy: to be asked for anew after each update.
        """
        if self._values_copy is not None:
            self._values_copy.fetch()
        return self._data

    def mark_written(self) -> None:
        """Say that `data` was written to."""
        if self._values_copy is not None:
            self._values_copy.written()

    def as_array(self) -> np.ndarray:
        """A copy of the values, of shape ``(V, *row shape)``."""
        return np.array(self.as_user_rows(self.data), order="C")

    def row_as_array(self, i: int) -> np.ndarray:
        """A copy of row ``i``, of the row's shape.

        Raises:
            IndexRangeError: there is no row ``i``.
        """
        return np.array(self.data[self._row(i)].T, order="C")

    def rows_as_array(self, ids: Sequence[int]) -> np.ndarray:
        """A copy of the rows ``ids``, of shape ``(len(ids), *row shape)``.

        Raises:
            IndexRangeError: a row that is not there.
        """
        rows = [self._row(i) for i in ids]
        return np.array(_rows_transposed(self.data[rows]), order="C")

    def init_row(self, i: int, row: Any) -> None:
        """Set the values of row ``i`` from an array of the row's shape.

        Raises:
            IndexRangeError: there is no row ``i``.
            ShapeError: another shape.
        """
        i = self._row(i)
        self.data[i] = of_shape(f"row {i} of {self.name}", row, self.type.shape).T
        self._changed()

    def init_from_array(self, array: Any) -> None:
        """Set all values from an array of shape ``(V, *row shape)``.

        Raises:
            ShapeError: another shape.
        """
        self.data[...] = _rows_transposed(of_shape(self.name, array, self.shape))
        self._changed()

    def zero(self) -> None:
        """Set the values and the gradient to zero."""
        self.data[...] = 0
        self.clear_gradient()
        self._changed()

    def scale(self, a: float) -> None:
        """Multiply the values by a number."""
        self.data[...] *= a
        self._changed()

    # Gradient

    @property
    def gradient_rows(self) -> np.ndarray:
        """The gradient of the whole table, laid out as `data`; all rows that are not in `touched` are zero."""
        found = self._allocated_gradient()
        if self._gradient_copy is not None:
            self._gradient_copy.fetch()
            self._gradient_copy.written()
        return found

    def _allocated_gradient(self) -> np.ndarray:
        if self._gradient is None:
            self._gradient = aligned_zeros(self._data.size, self._data.dtype).reshape(self._data.shape)
            self._is_touched = np.zeros(self.size, dtype=np.bool_)
            self._touched = np.empty(self.size, dtype=np.int64)
        return self._gradient

    @property
    def touched(self) -> np.ndarray:
        """The rows with a gradient since it was cleared last: sorted, each once, int64."""
        return np.sort(self._touched[: self._touched_count])

    def add_gradient(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Add to the gradients of some rows, in the order given.

        Arguments:
            ids: int64 array of rows; a row may be there more than once.
            rows: what to add, an array of shape ``(len(ids), *type.storage)``.

        Raises:
            IndexRangeError: a row that is not there; nothing is added then.
            ShapeError: ``rows`` has another shape.
        """
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        rows = np.ascontiguousarray(rows, dtype=self.type.dtype)
        if rows.size != ids.size * self.type.size:
            raise ShapeError(f"{self.name}: a gradient of shape {rows.shape} for {ids.size} rows of {self.type}")
        self._add_rows(self.gradient_rows.reshape(self.size, -1), ids, rows.reshape(ids.size, self.type.size))

    def touch(self, ids: np.ndarray) -> None:
        """Say that rows get a gradient on a device.

        Raises:
            IndexRangeError: a row that is not there.
        """
        self._allocated_gradient()
        nothing = np.empty((max(ids.size, self.size), 0), self.type.dtype)
        self._add_rows(nothing[: self.size], ids, nothing[: ids.size])

    def _add_rows(self, gradient: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
        from dynbatch.cpu.trainer_kernels import add_rows

        count = add_rows(gradient, self._is_touched, self._touched, self._touched_count, ids, rows)
        if count < 0:
            raise IndexRangeError(f"{self.name} has {self.size} rows: a gradient for row {ids[-1 - count]} was added")
        self._touched_count = count

    def clear_gradient(self) -> None:
        """Set the gradient to zero, touching only the rows that have one."""
        if self._gradient is not None:
            if self._gradient_copy is not None:
                self._gradient_copy.clear()
            else:
                self._gradient[self._touched[: self._touched_count]] = 0
            self.mark_cleared()

    def grad_as_array(self) -> np.ndarray:
        """A copy of the gradient, of shape ``(V, *row shape)``."""
        return np.array(self.as_user_rows(self.gradient_rows), order="C")

    def scale_gradient(self, a: float) -> None:
        """Multiply the gradient by a number."""
        gradient = self.gradient_rows
        gradient *= a

    def as_user_rows(self, array: np.ndarray) -> np.ndarray:
        """A view of an array of the table's size, in storage order, in the user's shape ``(V, *row shape)``."""
        return _rows_transposed(array.reshape(self._data.shape))

    def mark_cleared(self) -> None:
        """Forget which rows were touched, once their gradients are zero again."""
        self._is_touched[self._touched[: self._touched_count]] = False
        self._touched_count = 0

    # On a device

    def flat(self) -> tuple[Any, Any]:
        """Values and gradient as trainers' kernels take them, flat, on the device where they are."""
        if self._buffers.device == "cpu":
            return self.data.reshape(-1), self.gradient_rows.reshape(-1)
        from dynbatch.cuda.devices import driver

        there = driver(self._buffers.device)
        return self.values_on(there), self.gradients_on(there)

    def values_on(self, driver: Driver) -> DeviceCopy:
        """The values on a device, flat."""
        from dynbatch.cuda.copies import copy_for

        self._values_copy = copy_for(self._values_copy, driver, self._data)
        return self._values_copy

    def gradients_on(self, driver: Driver) -> DeviceCopy:
        """The gradient of the whole table on a device, flat."""
        from dynbatch.cuda.copies import copy_for

        self._gradient_copy = copy_for(self._gradient_copy, driver, self._allocated_gradient())
        return self._gradient_copy

    def device_values(self, driver: Driver) -> int:
        """Address of the values on a device."""
        return self.values_on(driver).address

    def leave_device(self) -> None:
        """Give up what is on a device, having fetched it."""
        self._fetch()
        self._values_copy = self._gradient_copy = None

    def _fetch(self) -> None:
        for copy in (self._values_copy, self._gradient_copy):
            if copy is not None:
                copy.fetch()

    def _changed(self) -> None:
        self._buffers.version += 1
        self.mark_written()

    def _row(self, i: int) -> int:
        row = index(i)
        if not 0 <= row < self.size:
            raise IndexRangeError(f"{self.name} has {self.size} rows: there is no row {row}")
        return row


def _rows_transposed(rows: np.ndarray) -> np.ndarray:
    """A view with each row's axes reversed: from the user's order to storage order, and back."""
    return rows.transpose(0, *range(rows.ndim - 1, 0, -1))
