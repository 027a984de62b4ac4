"""Compiled passes over the recorded stream: decoding, ancestors, levels, and the index tables of a plan.

All take flat int64 arrays. ``layout[s]`` is (arguments, lists, integers, floats, outputs) of signature ``s``; node
``n`` starts at ``pos[n]`` in the stream, and its first output is value ``first[n]``.
"""

from __future__ import annotations

import numpy as np

from dynbatch.cpu.jit import jit

ARGS, LISTS, INTS, FLOATS, OUTS = range(5)


@jit()
def decode(stream, start, end, layout, node, value, float_pos, pos, first, fpos, sig, producer):
    """Find the nodes in ``stream[start:end]`` and their signatures, and number their values; returns the next node."""
    p = start
    while p < end:
        s = stream[p]
        pos[node] = p
        sig[node] = s
        first[node] = value
        fpos[node] = float_pos
        for _ in range(layout[s, OUTS]):
            producer[value] = node
            value += 1
        float_pos += layout[s, FLOATS]
        p += 1 + layout[s, ARGS]
        for _ in range(layout[s, LISTS]):
            p += 1 + stream[p]
        p += layout[s, INTS]
        node += 1
    return node


@jit()
def mark_ancestors(stream, layout, pos, producer, row, targets, nodes, marked):
    """Mark those of the pending ``nodes`` (ascending) that ``targets`` need; returns how many.

    One sweep from the newest node to the oldest: an argument is always older than what uses it.
    """
    for t in targets:
        n = producer[t]
        if row[n] < 0:
            marked[n] = True
    count = 0
    for i in range(nodes.size - 1, -1, -1):
        n = nodes[i]
        if not marked[n]:
            continue
        count += 1
        p = pos[n]
        s = stream[p]
        p += 1
        for _ in range(layout[s, ARGS]):
            m = producer[stream[p]]
            if row[m] < 0:
                marked[m] = True
            p += 1
        for _ in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                m = producer[stream[p]]
                if row[m] < 0:
                    marked[m] = True
                p += 1
    return count


@jit()
def list_ancestors(stream, layout, pos, producer, row, targets, marked, found):
    """List in ``found`` the nodes that ``targets`` need and that have not run, in no order; returns how many.

    It walks from the targets, so that it costs what they need however much is pending. ``marked`` is work space, False
    for every node.
    """
    count = 0
    for t in targets:
        n = producer[t]
        if row[n] < 0 and not marked[n]:
            marked[n] = True
            found[count] = n
            count += 1
    i = 0
    while i < count:
        n = found[i]
        i += 1
        p = pos[n]
        s = stream[p]
        p += 1
        for a in range(layout[s, ARGS] + layout[s, LISTS]):
            length = 1
            if a >= layout[s, ARGS]:
                length = stream[p]
                p += 1
            for _ in range(length):
                m = producer[stream[p]]
                if row[m] < 0 and not marked[m]:
                    marked[m] = True
                    found[count] = m
                    count += 1
                p += 1
    for i in range(count):
        marked[found[i]] = False
    return count


@jit()
def count_operands(stream, layout, pos, nodes):
    """Operands of all nodes together: room for the edges."""
    count = 0
    for n in nodes:
        p = pos[n]
        s = stream[p]
        p += 1 + layout[s, ARGS]
        count += layout[s, ARGS]
        for _ in range(layout[s, LISTS]):
            count += stream[p]
            p += 1 + stream[p]
    return count


@jit()
def levels(stream, layout, pos, producer, member, nodes, level):
    """Level of each of ``nodes`` (ascending): one more than its deepest argument within ``member``, else zero.

    Returns the number of levels.
    """
    deepest = -1
    for n in nodes:
        s = stream[pos[n]]
        p = pos[n] + 1
        d = 0
        for _ in range(layout[s, ARGS]):
            m = producer[stream[p]]
            if member[m] and level[m] >= d:
                d = level[m] + 1
            p += 1
        for _ in range(layout[s, LISTS]):
            length = stream[p]
            p += 1
            for _ in range(length):
                m = producer[stream[p]]
                if member[m] and level[m] >= d:
                    d = level[m] + 1
                p += 1
        level[n] = d
        if d > deepest:
            deepest = d
    return deepest + 1


@jit()
def staged_levels(stream, layout, pos, producer, member, nodes, phase, skipped, level, deepest):
    """Levels that start anew in each phase, and count ``skipped`` operations of a node as if they were there.

    A node belongs to its own phase or to its arguments' latest, whichever is later (``phase`` is changed so). All of a
    phase comes before the next: its levels start where the phase before it ends. ``deepest`` is work space with one
    entry a phase. Returns the number of levels.
    """
    deepest[:] = -1
    for n in nodes:
        s = stream[pos[n]]
        p = pos[n] + 1
        own = phase[n]
        d = 0
        for round in range(2):  # first the phase, then the level within it
            q = p
            for a in range(layout[s, ARGS] + layout[s, LISTS]):
                length = 1
                if a >= layout[s, ARGS]:
                    length = stream[q]
                    q += 1
                for _ in range(length):
                    m = producer[stream[q]]
                    q += 1
                    if not member[m]:
                        continue
                    if round == 0:
                        own = max(own, phase[m])
                    elif phase[m] == own:
                        d = max(d, level[m] + 1 + skipped[m])
        phase[n] = own
        level[n] = d
        deepest[own] = max(deepest[own], d)
    start = 0
    for k in range(deepest.size):
        start, deepest[k] = start + deepest[k] + 1, start
    for n in nodes:
        level[n] += deepest[phase[n]]
    return start


@jit()
def sort_by(keys, nodes, size, result):
    """Stable counting sort of ``nodes`` by ``keys[node]`` in 0..size-1."""
    start = np.zeros(size + 1, np.int64)
    for n in nodes:
        start[keys[n] + 1] += 1
    for k in range(size):
        start[k + 1] += start[k]
    for n in nodes:
        k = keys[n]
        result[start[k]] = n
        start[k] += 1


@jit()
def cut_batches(nodes, sig, level, starts):
    """Boundaries where signature or level changes in a sorted list; returns how many batches there are."""
    count = 0
    for i in range(nodes.size):
        n = nodes[i]
        if i == 0 or sig[n] != sig[nodes[i - 1]] or level[n] != level[nodes[i - 1]]:
            starts[count] = i
            count += 1
    starts[count] = nodes.size
    return count


@jit()
def joiners(stream, layout, pos, producer, nodes, marked, group, group_needed, chosen):
    """Choose the marked nodes, and those of a needed group whose pending arguments are all chosen (ascending)."""
    count = 0
    for n in nodes:
        take = marked[n]
        if not take and group_needed[group[n]]:
            take = True
            s = stream[pos[n]]
            p = pos[n] + 1
            for _ in range(layout[s, ARGS]):
                m = producer[stream[p]]
                if group[m] >= 0 and not chosen[m]:
                    take = False
                p += 1
            for _ in range(layout[s, LISTS]):
                length = stream[p]
                p += 1
                for _ in range(length):
                    m = producer[stream[p]]
                    if group[m] >= 0 and not chosen[m]:
                        take = False
                    p += 1
        chosen[n] = take
        count += take
    return count


@jit()
def table_sizes(stream, layout, pos, order, starts, signatures, offsets, metas, floats):
    """Where each batch's index table, flags and float payload start (see `make_tables`); totals come last."""
    t, m, f = 0, 0, 0
    for b in range(signatures.size):
        s = signatures[b]
        rows = starts[b + 1] - starts[b]
        offsets[b], metas[b], floats[b] = t, m, f
        t += rows * (layout[s, ARGS] + layout[s, INTS])
        m += layout[s, ARGS] + 2 * layout[s, LISTS]
        f += rows * layout[s, FLOATS]
        if layout[s, LISTS]:
            for i in range(starts[b], starts[b + 1]):
                p = pos[order[i]] + 1 + layout[s, ARGS]
                for _ in range(layout[s, LISTS]):
                    t += 1 + stream[p]
                    p += 1 + stream[p]
            t += layout[s, LISTS]
    offsets[signatures.size], metas[signatures.size], floats[signatures.size] = t, m, f


@jit()
def make_tables(stream, layout, pos, fpos, order, starts, signatures, location, widths, payload):
    """The operands of each batch, by column: the tables, their flags and floats, and where each batch's start.

    A batch's table holds for each argument the location of each row's operand; for each integer the payload; and for
    each list the ``rows + 1`` boundaries and the location of each element. Its flags say for each argument whether the
    locations are one contiguous run of ``widths`` (1: a view will do) or all the same (2: the batch shares one
    operand), and for each list the number of elements and whether they are a run.
    """
    batches = signatures.size
    offsets, metas, floats = np.empty((3, batches + 1), np.int64)
    table_sizes(stream, layout, pos, order, starts, signatures, offsets, metas, floats)
    table, meta = np.empty(offsets[batches], np.int64), np.empty(metas[batches], np.int64)
    ftable = np.empty(floats[batches], np.float64)
    for b in range(batches):
        s = signatures[b]
        lo, hi = starts[b], starts[b + 1]
        rows = hi - lo
        args, lists, ints, flts = layout[s, ARGS], layout[s, LISTS], layout[s, INTS], layout[s, FLOATS]
        t, m, f = offsets[b], metas[b], floats[b]
        for i in range(rows):
            n = order[lo + i]
            p = pos[n] + 1
            for a in range(args):
                table[t + a * rows + i] = location[stream[p + a]]
            p += args
            for _ in range(lists):
                p += 1 + stream[p]
            for k in range(ints):
                table[t + (args + k) * rows + i] = stream[p + k]
            for k in range(flts):
                ftable[f + k * rows + i] = payload[fpos[n] + k]
        for a in range(args):
            w = widths[s, a] if rows == 1 or table[t + a * rows + 1] != table[t + a * rows] else 0
            run = 1 if w else 2
            for i in range(1, rows):
                if table[t + a * rows + i] - table[t + a * rows + i - 1] != w:
                    run = 0
                    break
            meta[m + a] = run
        m += args
        t += (args + ints) * rows
        for k in range(lists):
            ptr = t
            e = t + rows + 1
            table[ptr] = 0
            w = widths[s, args + k]
            run = 1
            for i in range(rows):
                p = pos[order[lo + i]] + 1 + args
                for _ in range(k):
                    p += 1 + stream[p]
                length = stream[p]
                for j in range(length):
                    table[e] = location[stream[p + 1 + j]]
                    if e > t + rows + 1 and table[e] - table[e - 1] != w:
                        run = 0
                    e += 1
                table[ptr + i + 1] = table[ptr + i] + length
            meta[m] = table[ptr + rows]
            meta[m + 1] = run
            m += 2
            t = e
    return table, meta, ftable, offsets, metas, floats


@jit()
def place_rows(order, starts, signatures, first, layout, count, base, stride, row, location):
    """Give each node its row, counted on per signature, and each of its values a location."""
    for b in range(signatures.size):
        s = signatures[b]
        for i in range(starts[b], starts[b + 1]):
            n = order[i]
            r = count[s]
            count[s] = r + 1
            row[n] = r
            for o in range(layout[s, OUTS]):
                location[first[n] + o] = base[s, o] + r * stride[s, o]
