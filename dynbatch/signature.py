"""Signatures: a Program with the parameters that fill its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynbatch.compiler.ir import Program
    from dynbatch.types import Type


class Signature:
    """A Program with the parameters that fill its slots: what nodes must share to run in one batch.

    Attributes:
        program: the traced Program.
        binding: parameters, by slot.
        roots: the collections that hold their values.
        types: types of the outputs.
        tail: integer payloads that the trace adds to each call: an int for a literal, None for a random key.
        bounds: (position, size, op, what) of integer payloads that index something, to be checked at each call.
        place: (mark of the graph that used it last, its index there); one tuple so that threads cannot mix them.
    """

    __slots__ = (
        "__weakref__",
        "binding",
        "bounds",
        "cache",
        "equal_lists",
        "place",
        "program",
        "roots",
        "tail",
        "type",
        "types",
    )

    def __init__(
        self,
        program: Program,
        binding: tuple[Any, ...],
        tail: tuple[int | None, ...],
        bounds: tuple[tuple[int, int, str, str], ...] = (),
    ) -> None:
        self.program = program
        self.binding = binding
        self.roots = tuple({id(p.root): p.root for p in binding}.values())
        self.tail = tail
        self.bounds = bounds
        self.types: tuple[Type, ...] = tuple(program.values[v].type for v in program.outputs)  # type: ignore[misc]
        self.type = self.types[0]
        self.place: tuple[object, int] = (None, 0)
        self.cache: dict[Any, Any] = {}
        groups: dict[int, list[int]] = {}
        for index, group in program.groups.items():
            groups.setdefault(group, []).append(index)
        self.equal_lists = [tuple(g) for g in groups.values() if len(g) > 1]

    def version(self) -> tuple[int, ...]:
        """Changes whenever a value of a parameter in the binding changes, or moves."""
        return tuple([n for root in self.roots for n in root.state])

    def value_version(self) -> tuple[int, ...]:
        """Changes whenever a value changes."""
        return tuple([root.version for root in self.roots])
