"""How do several threads of this process do one thing to a lot of memory?

For work that holds no lock while it runs: numpy's copies and xxhash's sums of large buffers release the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import torch

_SMALLEST_SHARE_BYTES = 1 << 20
"""Below this a thread costs more to wake than it saves."""

_crews: dict[int, ThreadPoolExecutor] = {}
_num_threads = 0
"""0: as many as torch has."""


def use_threads(num_threads: int) -> None:
    """Share work among so many threads from now on: torch's own may have been told to rest."""
    global _num_threads
    _num_threads = num_threads


def share(work: Callable[[int, int], None], num_items: int, item_bytes: int) -> None:
    """Call `work(start, end)` for ranges that make up `num_items`, one per thread (`use_threads`)."""
    num_shares = max(
        1, min(_num_threads or torch.get_num_threads(), num_items, num_items * item_bytes // _SMALLEST_SHARE_BYTES)
    )
    bounds = [num_items * index // num_shares for index in range(num_shares + 1)]
    if num_shares == 1:
        work(0, num_items)
        return
    crew = _crews.get(num_shares)
    if crew is None:
        crew = _crews[num_shares] = ThreadPoolExecutor(num_shares - 1, "kv-memory")
    others = [crew.submit(work, start, end) for start, end in pairwise(bounds[1:])]
    try:
        work(0, bounds[1])
    finally:
        wait(others)  # nobody may write once we have returned, not even after an error
    for other in others:
        other.result()
