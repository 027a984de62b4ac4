"""The instructions that no fused kernel computes, as products and fixed kernels.

Each function here appends a step for one value of a Program to a `DeviceRoutine`. Storage order is as everywhere: the
first dimension of a value is the one whose elements lie next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dynbatch.compiler.placement import is_vector_concatenation
from dynbatch.cuda import custom, launches
from dynbatch.cuda.broadcast import broadcasting
from dynbatch.cuda.job import NULL, DeviceJob, Rows
from dynbatch.cuda.products import multiply_gathered
from dynbatch.ops import elementwise, indexing, linear, normalization, reduction, segment, shape, softmax
from dynbatch.ops.custom import Custom, CustomGradient
from dynbatch.ops.primitive import Elementwise
from dynbatch.ops.reduction import keeping

if TYPE_CHECKING:
    from dynbatch.cuda.routine import DeviceRoutine

Shape = tuple[int, ...]
Lower = Callable[["DeviceRoutine", int], None]


def lower(routine: DeviceRoutine, v: int) -> None:
    """Append what computes instruction ``v``."""
    op = routine.values[v].op
    assert op is not None
    if isinstance(op, Elementwise):
        _elementwise(routine, v)
    elif isinstance(op, (Custom, CustomGradient)):
        custom.lower(routine, v)
    else:
        _LOWER[op](routine, v)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _four(shape: Shape) -> Shape:
    return (*shape, *[1] * (4 - len(shape)))


def _sizes(shape: Shape) -> list[np.int32]:
    """As kernels take the sizes of a value."""
    return [np.int32(n) for n in _four(shape)]


def _strides(shape: Shape, to: Shape = ()) -> list[np.int64]:
    """Elements between neighbours along each dimension; 0 along those that stretch to a larger shape."""
    found, step = [], 1
    for n, wanted in zip(_four(shape), _four(to or shape)):
        found.append(np.int64(0 if n == 1 and wanted != 1 else step))
        step *= n
    return found


def _split(shape: Shape, dim: int) -> tuple[np.int32, np.int32, np.int32]:
    """The numbers of elements before a dimension, along it and behind it."""
    return np.int32(math.prod(shape[:dim])), np.int32(shape[dim]), np.int32(math.prod(shape[dim + 1 :]))


def _shape(routine: DeviceRoutine, v: int) -> Shape:
    type = routine.values[v].type
    assert type is not None
    return type.shape


def _each_element(
    routine: DeviceRoutine,
    v: int,
    kernel: Any,
    operands: list[tuple[int, list[Any]]],
    before: list[Any],
    after: Callable[[DeviceJob], list[Any]] | None = None,
) -> None:
    """A kernel with a thread for each element of the result.

    Arguments:
        kernel: its name, or a generated one.
        operands: values, and the arguments behind each.
        before, after: arguments before and behind the operands.
    """
    finds = [(routine.rows(a), more) for a, more in operands]
    stride, domain = routine.stride[v], routine.values[v].domain
    size = routine.size(v)

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        if not count:
            return
        args = [np.int64(count), np.int64(job.places[v]), np.int64(stride), *before]
        for find, more in finds:
            args += [*find(job), *more]
        args += after(job) if after else []
        launch = launches.elements(count * size)
        if isinstance(kernel, str):
            job.launch(kernel, launch, *args)
        else:
            job.run_kernel("elementwise", kernel, launch, NULL, *args)

    routine.add(step)


def _elementwise(routine: DeviceRoutine, v: int) -> None:
    value = routine.values[v]
    op, to = value.op, _shape(routine, v)
    assert isinstance(op, Elementwise)
    handle = routine.kernels.generated(broadcasting(op))
    operands = [(a, _strides(_shape(routine, a), to)) for a in value.args]
    _each_element(routine, v, handle, operands, _sizes(to))


def _broadcast(routine: DeviceRoutine, v: int) -> None:
    (x,) = routine.values[v].args
    _rearrange(routine, v, x, _shape(routine, v), _strides(_shape(routine, x), _shape(routine, v)))


def _rearrange(
    routine: DeviceRoutine, v: int, x: int, sizes: Shape, source: list[Any], shift: int = 0, from_shift: int = 0,
    target: list[Any] | None = None,
) -> None:  # fmt: skip
    """Elements in another arrangement, by strides; ``from_shift`` elements on in the operand's rows."""
    find = routine.rows(x)
    target = target or _strides(sizes)
    stride, domain = routine.stride[v], routine.values[v].domain

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        if not count:
            return
        base, offsets, place, row_step = find(job)
        job.launch(
            "rearrange", launches.elements(count * math.prod(sizes)), np.int64(count),
            np.int64(job.places[v] + shift), np.int64(stride), base, offsets, np.int64(place + from_shift), row_step,
            *_sizes(sizes), *source, *target,
        )  # fmt: skip

    routine.add(step)


def _same(routine: DeviceRoutine, v: int) -> None:
    x = routine.values[v].args[0]
    find, width, domain, stride = routine.rows(x), routine.size(v), routine.values[v].domain, routine.stride[v]

    def step(job: DeviceJob) -> None:
        if job.counts[domain]:
            job.copy(find(job), job.counts[domain], width, job.places[v], stride)

    routine.add(step)


def _transpose(routine: DeviceRoutine, v: int) -> None:
    (x,) = routine.values[v].args
    m = _shape(routine, x)[0]
    _rearrange(routine, v, x, _shape(routine, v), [np.int64(n) for n in (m, 1, 0, 0)])


def _pick_range(routine: DeviceRoutine, v: int) -> None:
    (x,) = routine.values[v].args
    attrs = dict(routine.values[v].attrs)
    strides = _strides(_shape(routine, x))
    shift = attrs["start"] * int(strides[attrs["dim"]])
    _rearrange(routine, v, x, _shape(routine, v), strides, from_shift=shift)


def _pad_range(routine: DeviceRoutine, v: int) -> None:
    (x,) = routine.values[v].args
    attrs = dict(routine.values[v].attrs)
    inner, part, outer = _split(_shape(routine, x), attrs["dim"])
    after = [inner, np.int32(attrs["size"]), outer, np.int32(attrs["start"]), part]
    _each_element(routine, v, "pad_range", [(x, after)], [])


def _concatenate(routine: DeviceRoutine, v: int) -> None:
    value = routine.values[v]
    whole, dim = _shape(routine, v), dict(value.attrs)["dim"]
    strides = _strides(whole)
    vectors = is_vector_concatenation(routine.program, v)
    shift = 0
    for a in value.args:
        of = _shape(routine, a)
        if not (vectors and routine.part_of.get(a) == (v, shift)):
            if vectors:
                _copy_part(routine, v, a, shift)
            else:
                _rearrange(routine, v, a, of, _strides(of), shift=shift, target=strides)
        shift += (of[dim] if dim < len(of) else 1) * int(strides[dim])


def _copy_part(routine: DeviceRoutine, v: int, a: int, shift: int) -> None:
    find, width, domain, stride = routine.rows(a), routine.size(a), routine.values[v].domain, routine.stride[v]

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        if count:
            job.copy(find(job), count, width, job.places[v] + shift, stride)
            job.gathered += count * width

    routine.add(step)


# ---- choices by index ------------------------------------------------------------------------------------------------


def _lookup(routine: DeviceRoutine, v: int) -> None:
    table, index = routine.values[v].args
    address, width, stride = routine.integer_address(index), routine.size(v), routine.stride[v]
    domain = routine.values[v].domain
    vector = launches.vector(routine.kernels.dtype)

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        if count:
            job.launch(
                "lookup_rows", launches.teams(count, width, vector), np.int64(count), np.int32(width),
                np.int64(job.places[v]), np.int64(stride), np.uint64(job.shared[table]), np.uint64(address(job)),
            )  # fmt: skip

    routine.add(step)


def _columns(routine: DeviceRoutine, indices: tuple[int, ...]) -> Callable[[DeviceJob], list[Any]]:
    """Arguments for several integer columns: the address of the first, and integers from one to the next."""
    if len(indices) == 1:
        address = routine.integer_address(indices[0])
        return lambda job: [np.uint64(address(job)), np.int64(0)]

    def together(job: DeviceJob) -> list[Any]:
        columns = np.stack([routine.integers(job, i) for i in indices])
        return [np.uint64(job.arena.uploads.put(columns)), np.int64(columns.shape[1])]

    return together


def _select(routine: DeviceRoutine, v: int) -> None:
    x, *indices = routine.values[v].args
    after = [*_split(_shape(routine, x), dict(routine.values[v].attrs)["dim"]), np.int32(len(indices))]
    _each_element(routine, v, "select_along", [(x, after)], [], _columns(routine, tuple(indices)))


def _select_gradient(routine: DeviceRoutine, v: int) -> None:
    x, *indices = routine.values[v].args
    after = [*_split(_shape(routine, v), dict(routine.values[v].attrs)["dim"]), np.int32(len(indices))]
    _each_element(routine, v, "select_along_gradient", [(x, after)], [], _columns(routine, tuple(indices)))


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduce(routine: DeviceRoutine, v: int) -> None:
    value = routine.values[v]
    (x,), of = value.args, _shape(routine, value.args[0])
    op, to = value.op, dict(value.attrs).get("shape")
    if op is reduction.max_dim:
        op, to = reduction.max_to, keeping(of, dict(value.attrs)["dim"])
    assert op is not None and to is not None
    to = _four(to)
    reduced = [np.int32(n // m) for n, m in zip(_four(of), to)]
    strides = _strides(of)
    _each_element(routine, v, op.name, [(x, [*_sizes(to), *strides, *reduced, *strides])], [])


def _lines(kernel: str) -> Lower:
    """A kernel with a team for each line of elements along a dimension."""

    def lower_lines(routine: DeviceRoutine, v: int) -> None:
        value = routine.values[v]
        attrs = dict(value.attrs)
        inner, size, outer = _split(_shape(routine, v), attrs.get("dim", 0))
        finds = [routine.rows(a) for a in value.args]
        rest = [np.dtype(routine.kernels.dtype).type(attrs["eps"])] if "eps" in attrs else []
        stride, domain = routine.stride[v], value.domain

        def step(job: DeviceJob) -> None:
            count = job.counts[domain]
            if count:
                operands = [part for find in finds for part in find(job)]
                launch = launches.teams(count * int(inner) * int(outer), int(size))
                place = np.int64(job.places[v])
                job.launch(
                    kernel, launch, np.int64(count), place, np.int64(stride), inner, size, outer, *operands, *rest
                )

        routine.add(step)

    return lower_lines


def _segment_first(routine: DeviceRoutine, v: int) -> None:
    x, ptr = routine.values[v].args
    find, boundaries = routine.rows(x), routine.boundaries(ptr)
    width, stride, domain = routine.size(v), routine.stride[v], routine.values[v].domain

    def step(job: DeviceJob) -> None:
        if job.counts[domain]:
            job.launch(
                "segment_first", launches.elements(job.rows * width), np.int64(job.rows), np.int64(job.places[v]),
                np.int64(stride), *find(job), np.int32(width), np.uint64(boundaries(job)),
            )  # fmt: skip

    routine.add(step)


def _sum_rows(routine: DeviceRoutine, v: int) -> None:
    (x,) = routine.values[v].args
    find, width, domain = routine.place(x), routine.size(v), routine.values[x].domain

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        launch = launches.slices(count, width)
        slices = launch.grid[1]
        item = job.arena.itemsize
        sums = np.uint64(job.arena.scratch(slices * width) * item)
        place, stride = find(job)
        args: tuple[Any, ...] = sums, np.int64(count), np.int32(width), NULL, np.int64(place), np.int64(stride)
        job.run_kernel("sum_slices", job.kernels.fixed("sum_slices"), launch, *args)
        args = np.uint64(job.places[v] * item), np.int64(slices), np.int32(width), sums
        job.run_kernel("add_slices", job.kernels.fixed("add_slices"), launches.elements(width), *args)

    routine.add(step)


# ---- products --------------------------------------------------------------------------------------------------------


def _matrix(shape: Shape, transposed: bool) -> tuple[int, int]:
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    return (columns, rows) if transposed else (rows, columns)


def _factors(routine: DeviceRoutine, v: int) -> tuple[int, int, bool, bool, int, int, int]:
    """Operands of a product ``a * b``, which of them are transposed, and its sizes: m by k, and k by n."""
    value = routine.values[v]
    attrs = dict(value.attrs)
    left, right = value.args
    ta, tb = bool(attrs.get("ta")), bool(attrs.get("tb"))
    m, k = _matrix(_shape(routine, left), ta)
    return left, right, ta, tb, m, k, _matrix(_shape(routine, right), tb)[1]


def _matmul(routine: DeviceRoutine, v: int) -> None:
    """``a * b``: one product where all rows have the same ``a``, else one for each row.

    In storage order the result, of n by m, is b, of n by k, times a, of k by m.
    """
    left, right, ta, tb, m, k, n = _factors(routine, v)
    find_left, find_right = routine.rows(left), routine.rows(right)
    stride, domain = routine.stride[v], routine.values[v].domain
    lead_left, lead_right = (k if ta else m), (n if tb else k)
    width_right = routine.size(right)

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        if not count:
            return
        a, b = find_left(job), find_right(job)
        item = job.arena.itemsize
        to = job.places[v]
        if n == 1 and a.follows and not a.stride and not b.follows:
            # one matrix, and a vector of each row, wherever it lies
            multiply_gathered(job, b, address(job, a), count, k, m, ta, to, stride)
            return
        if not a.follows or not b.follows:
            team = launches.teams(count * m * n, k, launches.vector(routine.kernels.dtype))
            sizes = [np.int32(x) for x in (m, k, n)]
            common = np.int64(count), np.int64(to), np.int64(stride), *a, *b, *sizes
            if ta and not tb:
                job.launch("product_of_columns", team, *common)
            else:
                job.launch("product", launches.elements(count * m * n), *common, np.int32(ta), np.int32(tb))
            return
        of_a, of_b, c = address(job, a), address(job, b), to * item
        one_matrix = not a.stride or count == 1
        if one_matrix and n == 1 and b.stride:
            job.multiply(-1, False, ta, count, m, k, 1.0, of_b, int(b.stride), of_a, lead_left, 0.0, c, stride)
        elif one_matrix and not tb and (count == 1 or (int(b.stride) == width_right and stride == m * n)):
            job.multiply(-1, False, ta, count * n, m, k, 1.0, of_b, k, of_a, lead_left, 0.0, c, m)
        else:
            job.multiply(
                count, tb, ta, n, m, k, 1.0, of_b, lead_right, int(b.stride), of_a, lead_left, int(a.stride), 0.0, c,
                m, stride,
            )  # fmt: skip

    routine.add(step)


def address(job: DeviceJob, rows: Rows) -> int:
    """Of the first row, of rows that follow each other."""
    return int(rows.base) + int(rows.place) * job.arena.itemsize


def _matmul_rows(routine: DeviceRoutine, v: int) -> None:
    """The sum over all rows of ``a * b``: one product, whose inner dimension are the rows and k."""
    left, right, ta, tb, m, k, n = _factors(routine, v)
    domain = max(routine.values[left].domain, routine.values[right].domain)
    find_left = _by_inner(routine, left, domain, k, m, ta)
    find_right = _by_inner(routine, right, domain, k, n, not tb)

    def step(job: DeviceJob) -> None:
        count = job.counts[domain]
        item = job.arena.itemsize
        c = job.places[v] * item
        if not count:
            job.into.append(("fill", job.driver.fill, (c, 0, m * n * item)))
            return
        (a, a_step), (b, b_step) = find_left(job), find_right(job)
        job.multiply(-1, True, False, n, m, count * k, 1.0, b * item, b_step, a * item, a_step, 0.0, c, m)

    routine.add(step)


def _by_inner(
    routine: DeviceRoutine, x: int, domain: int, k: int, width: int, transposed: bool
) -> Callable[[DeviceJob], tuple[int, int]]:
    """How to find a factor of such a product as lines of ``width``, k of them a row, at equal distances.

    As it lies, a row has them one after the other, or where it is transposed, as columns.
    """
    find, size = routine.rows(x), routine.size(x)

    def found(job: DeviceJob) -> tuple[int, int]:
        count = job.counts[domain]
        rows = find(job)
        item = job.arena.itemsize
        in_place = rows.follows and (rows.stride or count == 1)
        if in_place and (k == 1 or ((not transposed or width == 1) and (count == 1 or int(rows.stride) == size))):
            step = int(rows.stride) if k == 1 and count > 1 else width
            return int(rows.base) // item + int(rows.place), step
        start = job.arena.scratch(count * size)
        job.gathered += count * size
        if transposed and k > 1 and width > 1:
            job.launch(
                "rearrange", launches.elements(count * size), np.int64(count), np.int64(start), np.int64(size), *rows,
                *_sizes((width, k)), *(np.int64(s) for s in (k, 1, 0, 0)), *_strides((width, k)),
            )  # fmt: skip
        else:
            job.copy(rows, count, size, start, size)
        return start, width

    return found


_LOWER: dict[Any, Lower] = {
    elementwise.broadcast_to: _broadcast,
    elementwise.scale_gradient: _same,
    shape.reshape: _same,
    shape.pick_range: _pick_range,
    shape.pad_range: _pad_range,
    shape.concatenate: _concatenate,
    linear.transpose: _transpose,
    linear.matmul: _matmul,
    linear.matmul_rows: _matmul_rows,
    indexing.lookup: _lookup,
    indexing.select: _select,
    indexing.select_gradient: _select_gradient,
    indexing.pick: _select,
    reduction.sum_to: _reduce,
    reduction.mean_to: _reduce,
    reduction.max_to: _reduce,
    reduction.max_dim: _reduce,
    reduction.sum_rows: _sum_rows,
    reduction.one_hot_argmax: _lines("one_hot_argmax"),
    softmax.softmax: _lines("softmax"),
    softmax.log_softmax: _lines("log_softmax"),
    softmax.softmax_gradient: _lines("softmax_gradient"),
    softmax.log_softmax_gradient: _lines("log_softmax_gradient"),
    normalization.normalize: _lines("normalize"),
    normalization.normalize_gradient: _lines("normalize_gradient"),
    segment.segment_first: _segment_first,
}
