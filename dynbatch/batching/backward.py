"""Compiled passes that plan a backward run: what the loss reaches, in which batches, and where gradients go."""

from __future__ import annotations

import numpy as np

from dynbatch.batching.stream import ARGS, LISTS
from dynbatch.cpu.jit import jit


@jit()
def reach(stream, layout, pos, producer, sig, trained, everything, loss, needs, wanted):
    """Mark the ancestors of node ``loss`` that a gradient is needed for; returns how many.

    Those are the ones that depend on a trained signature's parameters, or all. ``wanted[s, a]`` is set where argument
    (or list, behind the arguments) ``a`` of signature ``s`` needs a gradient in some node.
    """
    reached = np.zeros(loss + 1, np.bool_)
    reached[loss] = True
    for n in range(loss, -1, -1):
        if not reached[n]:
            continue
        s = sig[n]
        p = pos[n] + 1
        for _ in range(layout[s, ARGS]):
            reached[producer[stream[p]]] = True
            p += 1
        for _ in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                reached[producer[stream[p]]] = True
                p += 1
    count = 0
    for n in range(loss + 1):
        if not reached[n]:
            continue
        s = sig[n]
        need = everything or trained[s]
        p = pos[n] + 1
        for a in range(layout[s, ARGS]):
            if needs[producer[stream[p]]]:
                need = True
                wanted[s, a] = True
            p += 1
        for k in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                if needs[producer[stream[p]]]:
                    need = True
                    wanted[s, layout[s, ARGS] + k] = True
                p += 1
        needs[n] = need
        count += need
    return count


@jit()
def keep_needed(order, starts, signatures, needs, new_order, new_starts, new_signatures):
    """The needed nodes of the batches that ran, in that order; returns how many batches are left."""
    count = 0
    filled = 0
    for b in range(signatures.size):
        begin = filled
        for i in range(starts[b], starts[b + 1]):
            n = order[i]
            if n < needs.size and needs[n]:
                new_order[filled] = n
                filled += 1
        if filled > begin:
            new_starts[count] = begin
            new_signatures[count] = signatures[b]
            count += 1
    new_starts[count] = filled
    return count


@jit()
def count_rows(stream, layout, pos, order, starts, signatures, rows, elements, place, batch_row, batch_element):
    """Number the rows and list elements of each signature in this order: ``place[n]``, and where each batch starts."""
    for b in range(signatures.size):
        s = signatures[b]
        batch_row[b] = rows[s]
        for k in range(layout[s, LISTS]):
            batch_element[b, k] = elements[s, k]
        for i in range(starts[b], starts[b + 1]):
            n = order[i]
            place[n] = rows[s]
            rows[s] += 1
            p = pos[n] + 1 + layout[s, ARGS]
            for k in range(layout[s, LISTS]):
                elements[s, k] += stream[p]
                p += 1 + stream[p]


@jit()
def place_edges(stream, layout, pos, producer, order, starts, signatures, needs, base, stride, edge_location, uses):
    """Where each use of a value leaves its gradient (-1: nowhere); counts them in ``uses[value + 1]``."""
    count = np.zeros((layout.shape[0], base.shape[1] + 1), np.int64)
    for b in range(signatures.size):
        s = signatures[b]
        args = layout[s, ARGS]
        for i in range(starts[b], starts[b + 1]):
            p = pos[order[i]] + 1
            for a in range(args):
                if base[s, a] >= 0 and needs[producer[stream[p]]]:
                    edge_location[p] = base[s, a] + count[s, 0] * stride[s, a]
                    uses[stream[p] + 1] += 1
                p += 1
            for k in range(layout[s, LISTS]):
                length = stream[p]
                p += 1
                a = args + k
                for _ in range(length):
                    if base[s, a] >= 0 and needs[producer[stream[p]]]:
                        edge_location[p] = base[s, a] + count[s, 1 + k] * stride[s, a]
                        uses[stream[p] + 1] += 1
                    count[s, 1 + k] += 1
                    p += 1
            count[s, 0] += 1


@jit()
def list_edges(stream, layout, pos, order, edge_location, fill, edges):
    """The stream positions of each value's uses that carry a gradient, by value (``fill``: where each starts)."""
    for n in order:
        s = stream[pos[n]]
        p = pos[n] + 1
        for _ in range(layout[s, ARGS]):
            if edge_location[p] >= 0:
                v = stream[p]
                edges[fill[v]] = p
                fill[v] += 1
            p += 1
        for _ in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                if edge_location[p] >= 0:
                    v = stream[p]
                    edges[fill[v]] = p
                    fill[v] += 1
                p += 1


@jit()
def rows_are_runs(order, starts, row, runs):
    """Whether each batch's nodes lie in consecutive rows of their pool."""
    for b in range(runs.size):
        runs[b] = True
        for i in range(starts[b] + 1, starts[b + 1]):
            if row[order[i]] != row[order[i - 1]] + 1:
                runs[b] = False
                break
