"""The inner loop of a product: one tile of the result, a few rows by a few vectors, held in registers.

For each step along the inner dimension the tile reads one number of each of its rows and a few vectors of the packed
matrix, and does rows times vectors multiply-adds (the micro-kernel of Goto and van de Geijn, Anatomy of
High-Performance Matrix Multiplication, 2008). What numba makes of the same loops in Python reads and writes the sums
in memory; here they are values of LLVM's.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import config as numba_config
from numba import types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from dynbatch.cpu.native import declared

_INT, _LONG = ir.IntType(32), ir.IntType(64)


def _features() -> set[str]:
    """What the processor that numba compiles for can do."""
    chosen = numba_config.CPU_FEATURES  # type: ignore[attr-defined]
    text = get_host_cpu_features() if chosen is None else chosen  # type: ignore[no-untyped-call]
    return {name[1:] for name in text.split(",") if name.startswith("+")}


_FEATURES = _features()
_WIDE = "avx512f" in _FEATURES
_ARM = platform.machine() in ("aarch64", "arm64")
_FUSED = _ARM or "fma" in _FEATURES

VECTOR_BYTES = 64 if _WIDE else 32 if "avx" in _FEATURES else 16
"""Size of a vector."""
MOST_ROWS, MOST_VECTORS = (8, 3) if _WIDE or _ARM else (6, 2) if _FUSED else (4, 2)
"""The largest tile: with the vectors of the matrix it fills 32 registers, or 16, of which a sum in two steps needs two
more."""


def lanes(itemsize: int) -> int:
    """Numbers in a vector."""
    return VECTOR_BYTES // itemsize


@intrinsic
def tile(
    typingctx: Any, zero: Any, rows: Any, width: Any, inner: Any, x: Any, x_stride: Any,
    panel: Any, out: Any, out_stride: Any, goes_on: Any,
) -> Any:  # fmt: skip
    """``out[r, j] = sum over k of x[r, k] * panel[k, j]``, added up in the order of ``k``.

    Arguments:
        zero: of the type of the elements.
        rows: 1 to `MOST_ROWS`.
        width: 1 to `MOST_VECTORS` times `lanes`.
        inner: may be 0.
        x, x_stride: address of the first row, and elements between rows.
        panel: address of the packed columns, a multiple of `VECTOR_BYTES`; each step along ``inner`` has as many whole
            vectors as ``width`` needs.
        out, out_stride: address of the result, and elements between its rows.
        goes_on: 0, or else the sums begin with what is in ``out``.
    """
    if zero not in (types.float32, types.float64):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _TileWriter(builder, 4 if zero == types.float32 else 8).write(*args)
        return context.get_dummy_value()

    return types.void(zero, *[types.int64] * 9), generate


class _TileWriter:
    """Writes the code of a tile: one loop for each number of rows and of vectors."""

    def __init__(self, builder: ir.IRBuilder, itemsize: int) -> None:
        self.builder = builder
        self.itemsize = itemsize
        self.real = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.lanes = lanes(itemsize)
        self.vector = ir.VectorType(self.real, self.lanes)
        self.suffix = f"v{self.lanes}f{8 * itemsize}"

    def write(
        self, zero: Any, rows: Any, width: Any, inner: Any, x: Any, x_stride: Any,
        panel: Any, out: Any, out_stride: Any, goes_on: Any,
    ) -> None:  # fmt: skip
        """The whole: a switch over the loops, each between its loads and its stores."""
        b = self.builder
        last = b.sub(width, _long(1))
        vectors = b.udiv(last, _long(self.lanes))
        in_last = b.add(b.urem(last, _long(self.lanes)), _long(1))
        is_full = b.icmp_unsigned("==", in_last, _long(self.lanes))
        goes_on = b.icmp_unsigned("!=", goes_on, _long(0))
        mask = self._first(in_last)
        done = b.append_basic_block("tile_done")
        which = b.add(b.mul(rows, _long(MOST_VECTORS)), vectors)
        switch = b.switch(which, done)
        for r in range(1, MOST_ROWS + 1):
            for v in range(1, MOST_VECTORS + 1):
                block = b.append_basic_block(f"tile_{r}_{v}")
                switch.add_case(_long(r * MOST_VECTORS + v - 1), block)
                b.position_at_end(block)
                places = self._places(r, v, out, out_stride)
                before = self._before(places, goes_on, mask)
                x_rows = [self._pointer(b.add(x, b.mul(x_stride, _long(i * self.itemsize)))) for i in range(r)]
                self._store(self._loop(x_rows, inner, panel, before), places, is_full, mask)
                b.branch(done)
        b.position_at_end(done)

    def _places(self, rows: int, vectors: int, out: Any, stride: Any) -> list[list[Any]]:
        """Where the results go, for each row its vectors."""
        b = self.builder
        firsts = [self._pointer(b.add(out, b.mul(stride, _long(r * self.itemsize)))) for r in range(rows)]
        return [[self._as_vector(b.gep(f, [_long(v * self.lanes)])) for v in range(vectors)] for f in firsts]

    def _before(self, places: list[list[Any]], goes_on: Any, mask: Any) -> list[list[Any]]:
        """What the sums begin with: zero, or what is in their places."""
        b = self.builder
        nothing = ir.Constant(self.vector, [0.0] * self.lanes)
        start = b.block
        with b.if_then(goes_on):
            found = [[b.load(p, align=self.itemsize) for p in row[:-1]] for row in places]
            for row, row_places in zip(found, places):
                row.append(self._masked("load", [row_places[-1], self._alignment(), mask, nothing], self.vector))
            loaded = b.block
        sums = []
        for row in found:
            sums.append([b.phi(self.vector) for _ in row])
            for s, value in zip(sums[-1], row):
                s.add_incoming(nothing, start)
                s.add_incoming(value, loaded)
        return sums

    def _loop(self, rows: list[Any], inner: Any, panel: Any, before: list[list[Any]]) -> list[list[Any]]:
        """The sums, for each row its vectors."""
        b = self.builder
        start = b.block
        vectors = len(before[0])
        loop, end = b.append_basic_block("along_inner"), b.append_basic_block("sums")
        b.cbranch(b.icmp_signed(">", inner, _long(0)), loop, end)
        b.position_at_end(loop)
        k = b.phi(_LONG)
        sums = [[b.phi(self.vector) for _ in row] for row in before]
        columns = b.gep(self._pointer(panel), [b.mul(k, _long(vectors * self.lanes))])
        matrix = [self._load_vector(b.gep(columns, [_long(v * self.lanes)])) for v in range(vectors)]
        after = []
        for row, row_sums in zip(rows, sums):
            number = self._broadcast(b.load(b.gep(row, [k])))
            after.append([self._multiply_add(number, m, s) for m, s in zip(matrix, row_sums)])
        following = b.add(k, _long(1))
        b.cbranch(b.icmp_signed("<", following, inner), loop, end)
        k.add_incoming(_long(0), start)
        k.add_incoming(following, loop)
        b.position_at_end(end)
        results = []
        for row_before, row_sums, row_after in zip(before, sums, after):
            results.append([b.phi(self.vector) for _ in row_sums])
            for begin, s, a, result in zip(row_before, row_sums, row_after, results[-1]):
                for phi in (s, result):
                    phi.add_incoming(begin, start)
                    phi.add_incoming(a, loop)
        return results

    def _store(self, sums: list[list[Any]], places: list[list[Any]], is_full: Any, mask: Any) -> None:
        b = self.builder
        for row_sums, row in zip(sums, places):
            for s, place in zip(row_sums[:-1], row):
                b.store(s, place, align=self.itemsize)
        with b.if_else(is_full) as (whole, partial):
            with whole:
                for row_sums, row in zip(sums, places):
                    b.store(row_sums[-1], row[-1], align=self.itemsize)
            with partial:
                for row_sums, row in zip(sums, places):
                    self._masked("store", [row_sums[-1], row[-1], self._alignment(), mask], ir.VoidType())

    def _masked(self, what: str, arguments: list[Any], result: ir.Type) -> Any:
        """Load or store the lanes of a mask."""
        function_type = ir.FunctionType(result, [a.type for a in arguments])
        name = f"llvm.masked.{what}.{self.suffix}.p0"
        return self.builder.call(declared(self.builder.module, name, function_type), arguments)

    def _alignment(self) -> Any:
        return ir.Constant(_INT, self.itemsize)

    def _first(self, count: Any) -> Any:
        """The mask of the first ``count`` lanes."""
        b = self.builder
        numbers = ir.VectorType(_LONG, self.lanes)
        counts = self._broadcast(count)
        return b.icmp_unsigned("<", ir.Constant(numbers, list(range(self.lanes))), counts)

    def _broadcast(self, number: Any) -> Any:
        b = self.builder
        nothing = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        one = b.insert_element(nothing, number, ir.Constant(_INT, 0))
        return b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_INT, self.lanes), [0] * self.lanes))

    def _multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        b = self.builder
        if not _FUSED:  # LLVM would call a function of the C library for each lane
            return b.fadd(b.fmul(x, y), z)
        fma = declared(b.module, f"llvm.fma.{self.suffix}", ir.FunctionType(self.vector, [self.vector] * 3))
        return b.call(fma, [x, y, z])

    def _pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, self.real.as_pointer())

    def _as_vector(self, place: Any) -> Any:
        return self.builder.bitcast(place, self.vector.as_pointer())

    def _load_vector(self, place: Any) -> Any:
        return self.builder.load(self._as_vector(place), align=VECTOR_BYTES)


def _long(value: int) -> ir.Constant:
    return ir.Constant(_LONG, value)
