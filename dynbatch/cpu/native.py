"""What compiled code needs and numba does not offer: calls of addresses, and atomic operations on flat memory.

A function of a C library, or one that was compiled on its own, is called by its address, which is an argument: baked
into machine code that is kept on disk it would be another process's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_ORDER = "seq_cst"


FAR = 1 << 40
"""Elements that an array is said to have where it is made of an address and its end is not known."""


def declared(module: ir.Module, name: str, function_type: ir.FunctionType) -> ir.Function:
    """The function of this name in a module, declared where it is not yet."""
    return module.globals.get(name) or ir.Function(module, function_type, name)


def _caller(result: ir.IntType, numba_result: types.Type) -> Callable[..., Any]:
    def caller(typingctx: Any, function: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, packed = args
            values = [builder.extract_value(packed, i) for i in range(len(signature.args[1]))]
            function_type = ir.FunctionType(result, [v.type for v in values])
            return builder.call(builder.inttoptr(address, function_type.as_pointer()), values)

        if not isinstance(arguments, types.BaseTuple):
            return None
        return numba_result(types.int64, arguments), generate

    return caller


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """``function(*arguments)`` by C's conventions, as a 32-bit integer (of no meaning where it returns nothing).

    The arguments, a tuple, are passed as what they are: ``np.int32``, ``np.float32`` and so on. An address is a 64-bit
    integer.
    """
    return _caller(_INT, types.int32)(typingctx, function, arguments)


@intrinsic
def call_long(typingctx: Any, function: Any, arguments: Any) -> Any:
    """As `call`, of a function that returns a 64-bit integer."""
    return _caller(_LONG, types.int64)(typingctx, function, arguments)


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Where an array's data lies; numba's ``array.ctypes.data`` takes ten times as long to compile."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _LONG)

    return (types.int64(array), generate) if isinstance(array, types.Array) else None


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The 64-bit integer at an address, read atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _LONG.as_pointer()), _ORDER, 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the 64-bit integer at an address atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _LONG.as_pointer()), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the 64-bit integer at an address atomically; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _LONG.as_pointer()), args[1], _ORDER)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Replace the 64-bit integer at an address atomically; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _LONG.as_pointer()), args[1], _ORDER)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the processor that this thread waits for another, so that one on the same core goes faster."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = binding.get_process_triple().split("-")[0]
        if machine == "x86_64":
            builder.call(declared(builder.module, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        elif machine in ("aarch64", "arm64"):
            hint = declared(builder.module, "llvm.aarch64.hint", ir.FunctionType(ir.VoidType(), [_INT]))
            builder.call(hint, [ir.Constant(_INT, 1)])  # YIELD
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer_to(typingctx: Any, zero: Any, address: Any) -> Any:
    """An address as a pointer to elements of the type of ``zero``, which ``numba.carray`` makes an array of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(zero, types.int64), generate  # type: ignore[no-untyped-call]
