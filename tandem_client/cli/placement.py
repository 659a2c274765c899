"""Divides the cores of a machine between workers, within NUMA nodes where the workers fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_LEAST_OF_EVEN_SHARE = 0.75
"""A worker stays within one node if it has this part of an even share there."""


def place_cores(nodes: Sequence[Sequence[int]], num_workers: int) -> list[tuple[int, ...]]:
    """Give each worker cores of one node, if that costs none of them more than a quarter of an even share.

    Else workers get runs of neighbouring cores, in the order of the nodes. `nodes` are the cores of each node that has
    any; one node is a machine without nodes.

    >>> place_cores([(0, 1, 2, 3), (4, 5, 6)], 2)
    [(0, 1, 2, 3), (4, 5, 6)]
    >>> place_cores([(0, 2, 4, 6), (1, 3, 5, 7)], 1)
    [(0, 2, 4, 6, 1, 3, 5, 7)]
    """
    cores = [core for node in nodes for core in node]
    if len(nodes) > 1 and len(cores) >= num_workers:
        within = _within_nodes(nodes, num_workers)
        if min(map(len, within)) >= _LEAST_OF_EVEN_SHARE * (len(cores) // num_workers):
            return within
    return divide_cores(cores, num_workers)


def divide_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Give each worker a run of neighbouring cores; where there are too few, workers share them in turn.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [(0, 1, 2), (3, 4)]
    >>> divide_cores([0, 1], 3)
    [(0,), (1,), (0,)]
    """
    if len(cores) < num_workers:
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    size, larger = divmod(len(cores), num_workers)
    starts = [index * size + min(index, larger) for index in range(num_workers + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def _within_nodes(nodes: Sequence[Sequence[int]], num_workers: int) -> list[tuple[int, ...]]:
    """Give each worker cores of one node, so that the smallest share is as large as possible.

    Worker after worker goes to the node with the most cores for one more (the method of D'Hondt). The workers of a node
    divide all of it. A node that is too small for any worker stays free.
    """
    counts = [0] * len(nodes)
    for _ in range(num_workers):
        best = max(range(len(nodes)), key=lambda index: len(nodes[index]) / (counts[index] + 1))
        counts[best] += 1
    return [share for node, count in zip(nodes, counts, strict=True) if count for share in divide_cores(node, count)]
