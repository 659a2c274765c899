"""Runs one task over much memory on several threads of this process.

The task must release the interpreter's lock: numpy's copies and xxhash's sums of large buffers do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import torch

_MIN_RANGE_BYTES = 1 << 20
"""For less, waking a thread costs more than it saves."""

_pool: ThreadPoolExecutor | None = None
_num_threads = 0
"""0: torch's number of threads."""


def use_threads(num_threads: int) -> None:
    """Set the number of threads, the caller's included; torch's own threads may be switched off."""
    global _num_threads, _pool
    if _pool is not None:
        _pool.shutdown()
    _num_threads, _pool = num_threads, None


def parallel_for(work: Callable[[int, int], None], num_items: int, item_bytes: int) -> None:
    """Call `work(start, end)` for ranges that together cover `num_items`, one per thread (`use_threads`)."""
    if not _num_threads:
        use_threads(torch.get_num_threads())
    num_ranges = max(1, min(_num_threads, num_items, num_items * item_bytes // _MIN_RANGE_BYTES))
    bounds = [num_items * index // num_ranges for index in range(num_ranges + 1)]
    if num_ranges == 1:
        work(0, num_items)
        return
    pool = _executor()
    others = [pool.submit(work, start, end) for start, end in pairwise(bounds[1:])]
    try:
        work(0, bounds[1])
    finally:
        wait(others)  # no thread may write after the return, not even after an error
    for other in others:
        other.result()


def _executor() -> ThreadPoolExecutor:
    """Return the one executor, which starts a thread when all that it has are busy."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(_num_threads - 1, "kv-memory")
    return _pool
