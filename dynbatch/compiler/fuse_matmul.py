"""Horizontal fusion: products that share their inputs become one product over stacked matrices."""

from __future__ import annotations

from dynbatch.compiler.ir import Program


def fuse_matmul(program: Program) -> Program:
    """Not yet."""
    return program
