"""Layout: the rows of a batch in the order in which their first consumer reads them.

An operand whose rows follow each other in memory is passed as a view; in any other order it has to be gathered.
"""

from __future__ import annotations

import numpy as np

from dynbatch.batching.pending import Pending
from dynbatch.batching.stream import ARGS, LISTS, count_operands
from dynbatch.cpu.jit import jit


@jit()
def _arrange(stream, layout, pos, producer, batch_of, placed, order, starts):
    """From the last batch to the first: order a batch by the uses met so far, then note what it uses itself.

    ``head[b]`` begins the linked list of uses of batch ``b``'s nodes. Everything is walked backwards and put in front,
    so that a list is in the order of its consumers: by batch, operand and row. ``batch_of`` and ``placed`` are work
    space, -1 and False for every node.
    """
    batches = starts.size - 1
    most = count_operands(stream, layout, pos, order)
    head, target, link = np.full(batches, -1, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
    result = np.empty_like(order)
    for b in range(batches):
        for i in range(starts[b], starts[b + 1]):
            batch_of[order[i]] = b
    edges = 0
    for b in range(batches - 1, -1, -1):
        lo, hi = starts[b], starts[b + 1]
        at = lo
        e = head[b]
        while e >= 0:
            n = target[e]
            if not placed[n]:
                placed[n] = True
                result[at] = n
                at += 1
            e = link[e]
        for i in range(lo, hi):
            n = order[i]
            if not placed[n]:
                placed[n] = True
                result[at] = n
                at += 1
        s = stream[pos[order[lo]]]
        args, lists = layout[s, ARGS], layout[s, LISTS]
        for k in range(lists - 1, -1, -1):
            for i in range(hi - 1, lo - 1, -1):
                p = pos[result[i]] + 1 + args
                for _ in range(k):
                    p += 1 + stream[p]
                for j in range(stream[p], 0, -1):
                    m = producer[stream[p + j]]
                    if batch_of[m] >= 0:
                        target[edges], link[edges] = m, head[batch_of[m]]
                        head[batch_of[m]] = edges
                        edges += 1
        for a in range(args - 1, -1, -1):
            for i in range(hi - 1, lo - 1, -1):
                m = producer[stream[pos[result[i]] + 1 + a]]
                if batch_of[m] >= 0:
                    target[edges], link[edges] = m, head[batch_of[m]]
                    head[batch_of[m]] = edges
                    edges += 1
    for n in order:
        batch_of[n] = -1
        placed[n] = False
    return result


def arrange(pending: Pending, order: np.ndarray, starts: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """The order with the nodes of each batch arranged by their consumers.

    Arguments:
        pending: as the strategy got it.
        order, starts: what the strategy made of it.
        placed: work space, False for every node.
    """
    walk = (pending.stream, pending.layout, pending.pos, pending.producer)
    result: np.ndarray = _arrange(*walk, pending.place, placed, order, starts)
    return result
