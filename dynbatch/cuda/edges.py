"""Which gradients a value sums: found on the host, so that kernels read nothing but their places."""

from __future__ import annotations

from dynbatch.cpu.jit import jit


@jit()
def count_edges(first, output, ptr, edges, edge_location, width):
    """How many gradients the values ``first[r] + output`` sum together, and where their sums lie already.

    That is where each has one edge and those follow each other: the location of the first row, else -1. A negative
    edge location means that no gradient comes from there.
    """
    total = 0
    single = True
    start = previous = -1
    for r in range(first.size):
        v = first[r] + output
        here = 0
        for e in range(ptr[v], ptr[v + 1]):
            at = edge_location[edges[e]]
            if at < 0:
                continue
            here += 1
            if r == 0:
                start = at
            elif at - previous != width:
                single = False
            previous = at
        single = single and here == 1
        total += here
    return total, start if single else -1


@jit()
def list_edges(first, output, ptr, edges, edge_location, boundaries, places):
    """Those gradients' places in the order in which they are summed, and where each row's begin and end."""
    count = 0
    boundaries[0] = 0
    for r in range(first.size):
        v = first[r] + output
        for e in range(ptr[v], ptr[v + 1]):
            at = edge_location[edges[e]]
            if at >= 0:
                places[count] = at
                count += 1
        boundaries[r + 1] = count
