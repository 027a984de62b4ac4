"""No batching: nodes run one by one in the order they were recorded, the elements of a manual batch together."""

from __future__ import annotations

import numpy as np

from dynbatch.batching.pending import Pending
from dynbatch.cpu.jit import jit


@jit()
def _runs(nodes, lane_group, sig, starts):
    count = 0
    for i in range(nodes.size):
        g = lane_group[nodes[i]]
        if i == 0 or g < 0 or g != lane_group[nodes[i - 1]] or sig[nodes[i]] != sig[nodes[i - 1]]:
            starts[count] = i
            count += 1
    starts[count] = nodes.size
    return count


def off(pending: Pending) -> tuple[np.ndarray, np.ndarray]:
    """Order of the chosen nodes, and where each batch starts in it (with the end as last entry)."""
    starts = np.empty(pending.nodes.size + 1, np.int64)
    count = _runs(pending.nodes, pending.lane_group, pending.sig, starts)
    return pending.nodes.copy(), starts[: count + 1]
