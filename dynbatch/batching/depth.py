"""Depth-based batching: nodes of one signature at one level run together, level by level."""

from __future__ import annotations

import numpy as np

from dynbatch.batching.pending import Pending
from dynbatch.batching.stream import cut_batches, sort_by


def depth(pending: Pending) -> tuple[np.ndarray, np.ndarray]:
    """Order of the chosen nodes, and where each batch starts in it (with the end as last entry)."""
    nodes = pending.nodes
    by_signature, order = np.empty_like(nodes), np.empty_like(nodes)
    sort_by(pending.sig, nodes, pending.signatures, by_signature)
    sort_by(pending.level, by_signature, pending.levels, order)
    starts = np.empty(nodes.size + 1, np.int64)
    count = cut_batches(order, pending.sig, pending.level, starts)
    return order, starts[: count + 1]
