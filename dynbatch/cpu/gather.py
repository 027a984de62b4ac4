"""Compiled gathers, copies and the pulled sums of gradients, over one flat array addressed by offsets."""

from __future__ import annotations

from dynbatch.cpu.jit import jit


@jit(boundscheck=False)
def gather(mem, offsets, column, width, start, stride):
    """Copy ``width`` elements from ``column`` behind each offset to rows ``start``, ``start + stride``, ..."""
    for r in range(offsets.size):
        source = mem[offsets[r] + column : offsets[r] + column + width]
        target = mem[start + r * stride : start + r * stride + width]
        for j in range(width):
            target[j] = source[j]


@jit(boundscheck=False)
def gather_columns(mem, offsets, columns, width, start, stride):
    """Copy matrices of ``columns`` columns of ``width`` elements, to columns at ``start``, ``start + stride``, ..."""
    for r in range(offsets.size):
        for c in range(columns):
            source = mem[offsets[r] + c * width : offsets[r] + (c + 1) * width]
            to = start + (r * columns + c) * stride
            target = mem[to : to + width]
            for j in range(width):
                target[j] = source[j]


@jit(boundscheck=False)
def gather_from(data, offsets, width, mem, start):
    """Copy ``width`` elements of ``data`` from each offset to consecutive rows of ``mem``."""
    for r in range(offsets.size):
        source = data[offsets[r] : offsets[r] + width]
        target = mem[start + r * width : start + (r + 1) * width]
        for j in range(width):
            target[j] = source[j]


@jit(boundscheck=False)
def lookup_rows(table, indices, width, mem, start, stride):
    """Copy rows of a flat table of rows of ``width`` to rows ``start``, ``start + stride``, ..."""
    for r in range(indices.size):
        source = table[indices[r] * width : (indices[r] + 1) * width]
        target = mem[start + r * stride : start + r * stride + width]
        for j in range(width):
            target[j] = source[j]


@jit(boundscheck=False)
def copy_rows(mem, source, source_stride, rows, width, start, stride):
    """Copy ``width`` elements of each row, rows being at equal distances on both sides."""
    for r in range(rows):
        row = mem[source + r * source_stride : source + r * source_stride + width]
        target = mem[start + r * stride : start + r * stride + width]
        for j in range(width):
            target[j] = row[j]


@jit(boundscheck=False)
def sum_edges(mem, first, output, ptr, edges, edge_location, width, start):
    """For each value ``first[r] + output``, the sum of the gradients that its consumers wrote to their edges.

    Returns where the rows are: where each has one edge and those follow each other, nothing is copied and the location
    of the first is returned; else the sums are written from ``start`` on. A negative edge location means that no
    gradient comes from there.
    """
    rows = first.size
    single = True
    previous = 0
    for r in range(rows):
        v = first[r] + output
        if ptr[v + 1] - ptr[v] != 1:
            single = False
            break
        here = edge_location[edges[ptr[v]]]
        if here < 0 or (r and here - previous != width):
            single = False
            break
        previous = here
    if single and start < 0:
        return edge_location[edges[ptr[first[0] + output]]]
    if start < 0:
        return -1
    for r in range(rows):
        v = first[r] + output
        target = mem[start + r * width : start + (r + 1) * width]
        filled = False
        for e in range(ptr[v], ptr[v + 1]):
            here = edge_location[edges[e]]
            if here < 0:
                continue
            source = mem[here : here + width]
            if filled:
                for j in range(width):
                    target[j] += source[j]
            else:
                for j in range(width):
                    target[j] = source[j]
                filled = True
        if not filled:
            for j in range(width):
                target[j] = 0
    return start
