"""The errors that dynbatch raises, and the line of the user's code to name in them."""

from __future__ import annotations

import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class DynbatchError(Exception):
    """Base of every error that dynbatch raises on purpose."""


class ShapeError(DynbatchError, ValueError):
    """Operands whose shapes do not fit an op; names the op, the shapes and the parameter."""


class IndexRangeError(DynbatchError, IndexError):
    """An index outside of what it indexes; names the index, the size and the parameter."""


class StaleExpressionError(DynbatchError, RuntimeError):
    """An expression used after `renew_cg`, or together with one of another graph."""


class BackwardError(DynbatchError, RuntimeError):
    """A backward pass that cannot be run: a non-scalar loss, or parameters changed since the forward pass."""


class CellError(DynbatchError, RuntimeError):
    """A cell that does what a trace cannot hold: reads a value, branches on a payload, captures an expression."""


class StaticError(DynbatchError, RuntimeError):
    """A static function that does what a recording cannot hold: uses an expression from outside, reads a value."""


class MapError(DynbatchError, RuntimeError):
    """A call that an instance of a `dynbatch.map` cannot make, such as `renew_cg`."""


class InstanceStopped(BaseException):
    """Raised in an instance of a `dynbatch.map` that is stopped, since another one failed or the map was interrupted.

    No `Exception`, so that code which goes on after errors does not go on after this.
    """


class ValidityError(DynbatchError, ArithmeticError):
    """A NaN or infinity found under ``check_validity``; names the op and the batch."""


class ConfigurationError(DynbatchError, ValueError):
    """A setting that is unknown, or cannot be changed any more."""


class FileFormatError(DynbatchError, ValueError):
    """A file that is truncated, foreign or does not fit; names the file and what differs."""


class OutOfMemoryError(DynbatchError, MemoryError):
    """Not enough memory for a plan; says how much was wanted and how much there is."""


class DeviceError(DynbatchError, RuntimeError):
    """A device that cannot be used, or a fault on it; names the kernel, or says what to install."""


class CompileError(DynbatchError, ValueError):
    """Source of a kernel that does not compile; holds the compiler's messages."""


class CustomOpError(DynbatchError, RuntimeError):
    """A kernel that a user brought is at fault, or one that is needed is not there; names the op."""


def user_line() -> str:
    """``file:line`` of the innermost frame outside of the package, for error messages."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
