"""Agenda-based batching (Neubig, Goldberg and Dyer 2017): always run a signature all of whose ready nodes go together.

Among the signatures with ready nodes, the one whose last node has the lowest level is next. The paper takes the lowest
mean level of the nodes that remain; but a mean rises while a signature runs, and passes that of what only follows it:
the losses at the roots of a minibatch's trees then run in several batches, between those of the trees' upper nodes.
"""

from __future__ import annotations

import numpy as np

from dynbatch.batching.pending import Pending
from dynbatch.batching.stream import ARGS, LISTS, count_operands
from dynbatch.cpu.jit import jit


@jit()
def _list_edges(stream, layout, pos, producer, place, nodes, sig, level, edges, waiting, ptr, own_sig, own_level):
    """Pending arguments of each node, by place; how many each waits for; and in ``ptr[k + 1]`` how many use it."""
    e = 0
    for k in range(nodes.size):
        n = nodes[k]
        own_sig[k] = sig[n]
        own_level[k] = level[n]
        p = pos[n]
        s = stream[p]
        p += 1
        before = e
        for _ in range(layout[s, ARGS]):
            m = place[producer[stream[p]]]
            if m >= 0:
                edges[e] = m
                e += 1
                ptr[m + 1] += 1
            p += 1
        for _ in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                m = place[producer[stream[p]]]
                if m >= 0:
                    edges[e] = m
                    e += 1
                    ptr[m + 1] += 1
                p += 1
        waiting[k] = e - before


@jit()
def _list_users(edges, waiting, fill, users):
    """Turn the edges around: the users of each node, from ``fill[node]`` on."""
    e = 0
    for k in range(waiting.size):
        for _ in range(waiting[k]):
            m = edges[e]
            users[fill[m]] = k
            fill[m] += 1
            e += 1


@jit()
def _less(a, b, last):
    """Whether signature a comes before b: lower last level, then lower index (so that the order is defined)."""
    return last[a] < last[b] or (last[a] == last[b] and a < b)


@jit()
def _push(heap, size, item, last):
    i = size
    heap[i] = item
    while i:
        up = (i - 1) // 2
        if not _less(heap[i], heap[up], last):
            break
        heap[i], heap[up] = heap[up], heap[i]
        i = up


@jit()
def _pop(heap, size, last):
    """Remove the first of ``size`` items; returns it."""
    item = heap[0]
    heap[0] = heap[size - 1]
    size -= 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _less(heap[child + 1], heap[child], last):
            child += 1
        if not _less(heap[child], heap[i], last):
            break
        heap[i], heap[child] = heap[child], heap[i]
        i = child
    return item


@jit()
def _schedule(nodes, sig, level, signatures, waiting, ptr, users, link, order, starts):
    """Ready nodes of each signature are a linked list in order of becoming ready; a heap holds the ready signatures."""
    count = nodes.size
    last = np.zeros(signatures, np.int64)
    head = np.full(signatures, -1, np.int64)
    tail = np.full(signatures, -1, np.int64)
    heap = np.empty(signatures, np.int64)
    size = 0
    for k in range(count):
        s = sig[k]
        last[s] = max(last[s], level[k])
        link[k] = -1
        if waiting[k] == 0:
            if head[s] < 0:
                head[s] = k
            else:
                link[tail[s]] = k
            tail[s] = k
    for s in range(signatures):
        if head[s] >= 0:
            _push(heap, size, s, last)
            size += 1
    done = 0
    batches = 0
    while size:
        s = _pop(heap, size, last)
        size -= 1
        starts[batches] = done
        batches += 1
        begin = done
        k = head[s]
        head[s] = -1
        while k >= 0:
            order[done] = k
            done += 1
            k = link[k]
        for i in range(begin, done):  # the whole batch has run: release its consumers
            k = order[i]
            order[i] = nodes[k]
            for u in range(ptr[k], ptr[k + 1]):
                c = users[u]
                waiting[c] -= 1
                if waiting[c] == 0:
                    t = sig[c]
                    if head[t] < 0:
                        head[t] = c
                        if t != s:
                            _push(heap, size, t, last)
                            size += 1
                    else:
                        link[tail[t]] = c
                    tail[t] = c
        if head[s] >= 0:
            _push(heap, size, s, last)
            size += 1
    starts[batches] = done
    return batches


@jit()
def _agenda(stream, layout, pos, producer, place, nodes, sig, level, signatures):
    """The whole of it: order and starts of the batches. ``place`` is work space, -1 for every node."""
    count = nodes.size
    edges = np.empty(count_operands(stream, layout, pos, nodes), np.int32)
    users = np.empty_like(edges)
    waiting, own_sig, own_level, link = np.empty((4, count), np.int32)
    ptr, fill = np.zeros((2, count + 1), np.int32)
    order, starts = np.empty(count, np.int64), np.empty(count + 1, np.int64)
    for k in range(count):
        place[nodes[k]] = k
    _list_edges(stream, layout, pos, producer, place, nodes, sig, level, edges, waiting, ptr, own_sig, own_level)
    for k in range(count):
        place[nodes[k]] = -1
        fill[k] = ptr[k]
        ptr[k + 1] += ptr[k]
    _list_users(edges, waiting, fill, users)
    batches = _schedule(nodes, own_sig, own_level, signatures, waiting, ptr, users, link, order, starts)
    return order, starts[: batches + 1]


def agenda(pending: Pending) -> tuple[np.ndarray, np.ndarray]:
    """Order of the chosen nodes, and where each batch starts in it (with the end as last entry)."""
    order, starts = _agenda(
        pending.stream, pending.layout, pending.pos, pending.producer, pending.place, pending.nodes, pending.sig,
        pending.level, pending.signatures,
    )  # fmt: skip
    return order, starts
