"""Products of few rows with one matrix that is packed once: panels of columns, each read from front to back.

A weight is multiplied many times between two updates, by a few rows at a time. BLAS rearranges it each time, which
costs more than such a product does. Here it lies in panels as wide as a `tile` of `dynbatch.cpu.tile`, and the rows
are read where they lie, at equal distances. Sums run along the inner dimension in one order: a row's result is the same
bits whatever other rows there are, and however many threads.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dynbatch.cpu import team
from dynbatch.cpu.jit import jit, job_function
from dynbatch.cpu.native import call
from dynbatch.cpu.tile import MOST_ROWS, MOST_VECTORS, VECTOR_BYTES, tile

PARALLEL_FROM = 1 << 19
"""Multiply-adds from which on a product is split over threads: about ten times what it takes to meet another."""
_CHUNKS_A_THREAD = 4
_INNER_BLOCK = 512
"""Steps along the inner dimension after which the next rows come: so much of a panel stays in the second cache."""
# Fields of a job, 64-bit integers.
_X, _X_STRIDE, _ROWS, _PANELS, _INNER, _WIDTH, _OUT, _OUT_STRIDE, _PANEL_STEP, _ROW_STEP = range(10)
_FIELDS = 10


@functools.cache
def kernel(dtype: str) -> Any:
    """The compiled function that runs one chunk of a job, for ``float32`` or ``float64``; it has an ``address``."""
    return job_function(error_model="numpy")(_chunk_float32 if dtype == "float32" else _chunk_float64)


def _chunk_float32(job: Any, index: int) -> None:
    _chunk(np.float32(0), 4, job, index)


def _chunk_float64(job: Any, index: int) -> None:
    _chunk(np.float64(0), 8, job, index)


@jit(error_model="numpy")
def _chunk(zero: Any, item: int, job: Any, index: int) -> None:
    """Multiply some of the rows by some of the panels."""
    inner, width, vector = job[_INNER], job[_WIDTH], VECTOR_BYTES // item
    columns = MOST_VECTORS * vector
    row_groups = (job[_ROWS] + job[_ROW_STEP] - 1) // job[_ROW_STEP]
    first = index % row_groups * job[_ROW_STEP]
    rows = min(job[_ROW_STEP], job[_ROWS] - first)
    tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
    begin = index // row_groups * job[_PANEL_STEP] * columns
    for column in range(begin, min(begin + job[_PANEL_STEP] * columns, width), columns):
        here = min(columns, width - column)
        step = (here + vector - 1) // vector * vector
        for k in range(0, max(inner, 1), _INNER_BLOCK):
            panel = job[_PANELS] + (column * inner + k * step) * item
            row = first
            for t in range(tiles):
                height = (first + rows - row + tiles - t - 1) // (tiles - t)  # tiles of about the same height
                x = job[_X] + (k + row * job[_X_STRIDE]) * item
                out = job[_OUT] + (row * job[_OUT_STRIDE] + column) * item
                tile(
                    zero, height, here, min(_INNER_BLOCK, inner - k), x, job[_X_STRIDE],
                    panel, out, job[_OUT_STRIDE], k,
                )  # fmt: skip
                row += height


@jit(error_model="numpy")
def packed_product(
    team_address: int, function: int, x: int, x_stride: int, rows: int,
    panels: int, inner: int, width: int, out: int, out_stride: int, columns: int,
) -> None:  # fmt: skip
    """``out = x @ matrix``.

    Arguments:
        team_address: of the `team.Team` whose threads help.
        function: `kernel` of the elements' type.
        x, x_stride: address of the first row, and elements between rows.
        rows: may be 0.
        panels, inner, width: the packed matrix.
        out, out_stride: address of the result, and elements between its rows.
        columns: `dynbatch.cpu.packing.panel_columns` of the elements' type.
    """
    if rows == 0 or width == 0:
        return
    panel_count = (width + columns - 1) // columns
    panel_step, row_step = panel_count, rows
    threads = team.active(team_address)
    is_split = threads > 1 and rows * inner * width >= PARALLEL_FROM
    if is_split:
        wanted = threads * _CHUNKS_A_THREAD
        panel_step = (panel_count + wanted - 1) // wanted
        groups = (panel_count + panel_step - 1) // panel_step
        blocks = (wanted + groups - 1) // groups  # few panels: their rows are split too
        row_step = ((rows + blocks - 1) // blocks + MOST_ROWS - 1) // MOST_ROWS * MOST_ROWS
    job = np.empty(_FIELDS, np.int64)
    job[_X], job[_X_STRIDE], job[_ROWS] = x, x_stride, rows
    job[_PANELS], job[_INNER], job[_WIDTH] = panels, inner, width
    job[_OUT], job[_OUT_STRIDE], job[_PANEL_STEP], job[_ROW_STEP] = out, out_stride, panel_step, row_step
    if is_split:
        chunks = ((panel_count + panel_step - 1) // panel_step) * ((rows + row_step - 1) // row_step)
        team.run(team_address, function, job.ctypes.data, chunks)
    else:
        call(function, (job.ctypes.data, 0))
