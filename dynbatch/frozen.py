"""Views of parameters that receive no gradient: ``dy.parameter(p, update=False)``, ``dy.lookup(p, i, update=False)``."""

from __future__ import annotations

from typing import Any

from dynbatch.graph import Operand


class FrozenParameter(Operand):
    """A parameter as a constant; it has the parameter's current value."""

    is_parameter = True
    graph = None
    update = False

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.is_lookup = parameter.is_lookup
        self.type = parameter.type
        self.shape = parameter.shape
        self.size = getattr(parameter, "size", 0)
        self.name = parameter.name
        self.root = parameter.root
        self.key = self
        self.table: dict[Any, Any] = {}
        self.lookup_signature: Any = None

    @property
    def data(self) -> Any:
        """The parameter's values, in storage order."""
        return self.parameter.data

    @property
    def constant(self) -> FrozenParameter:
        """Itself."""
        return self

    def npvalue(self, recalculate: bool = False) -> Any:
        """A copy of the values, in the user's shape."""
        return self.parameter.as_array()


def frozen(parameter: Any) -> FrozenParameter:
    """The parameter's view without gradient; always the same one."""
    found = parameter.table.get("frozen")
    if found is None:
        found = parameter.table["frozen"] = FrozenParameter(parameter)
    return found
