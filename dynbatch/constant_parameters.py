"""Parameters as constants: what `dynbatch.parameter(p, update=False)` and `dynbatch.lookup(p, i, update=False)` use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.graph import Operand

if TYPE_CHECKING:
    from dynbatch.cuda.driver import Driver
    from dynbatch.lookup_parameters import LookupParameter
    from dynbatch.parameters import Parameter


class ConstantParameter(Operand):
    """The values of a parameter or lookup table, without a gradient: a binding of its own, so that it never mixes.

    Attributes:
        of: the parameter. ``type``, ``shape``, ``name``, ``root`` and (of a table) ``size`` are those of it.
        update: False.
    """

    is_parameter = True
    graph = None
    update = False

    def __init__(self, of: Parameter | LookupParameter) -> None:
        self.of = of
        self.is_lookup = of.is_lookup
        self.type = of.type
        self.shape = of.shape
        self.name = of.name
        self.root = of.root
        self.key = self
        self.size: int = getattr(of, "size", 0)
        self.table: dict[Any, Any] = {}
        self.lookup_signature: Any = None

    def __repr__(self) -> str:
        return f"constant {self.of!r}"

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what the core cached."""
        return self.__dict__ | {"table": {}, "lookup_signature": None}

    @property
    def constant(self) -> ConstantParameter:
        """The constant itself."""
        return self

    @property
    def data(self) -> np.ndarray:
        """The values, as of the parameter."""
        return self.of.data

    def device_values(self, driver: Driver) -> int:
        """Address of the values on a device."""
        return self.of.device_values(driver)

    def npvalue(self, recalculate: bool = False) -> np.ndarray:
        """The values, a copy in the user's shape."""
        found: np.ndarray = self.of.as_array() if self.is_lookup else self.of.npvalue()  # type: ignore[union-attr]
        return found
