"""Copying a Program while changing parts of it: the base of every pass."""

from __future__ import annotations

from dynbatch.compiler.ir import Builder, Program


class Rewriter(Builder):
    """Copies a Program instruction by instruction, so that a pass changes only what it is about."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.new: dict[int, int] = {}

    def copy(self, v: int) -> int:
        """Copy value ``v``, whose arguments were copied before."""
        value = self.program.values[v]
        if value.op is None:
            self.new[v] = self.input(value.kind, value.index, value.type, value.domain)
        else:
            self.new[v] = self.emit(value.op, *(self.new[a] for a in value.args), **dict(value.attrs))
        return self.new[v]

    def result(self) -> Program:
        """The rewritten Program, with the layout and name of the old one."""
        old = self.program
        return self.finish(
            tuple(self.new[v] for v in old.outputs),
            tuple((role, index, self.new[v]) for role, index, v in old.results),
            old.name,
            old.layout,
        )
