"""What a strategy is given: the nodes to run now, and arrays over all nodes of the graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Pending(NamedTuple):
    """Nodes to be put in order.

    Attributes:
        nodes: ids, ascending; arguments come before what uses them.
        sig: signature of each node.
        level: of each node in ``nodes``, its distance from what is already there.
        levels: number of levels.
        signatures: number of signatures.
        lane_group: the manual batch a node belongs to, or -1.
        stream, layout, pos, producer: see `dynbatch.batching.stream`.
        place: scratch, -1 for every node.
    """

    nodes: np.ndarray
    sig: np.ndarray
    level: np.ndarray
    levels: int
    signatures: int
    lane_group: np.ndarray
    stream: np.ndarray
    layout: np.ndarray
    pos: np.ndarray
    producer: np.ndarray
    place: np.ndarray
