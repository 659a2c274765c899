"""Leaves a running process no file descriptor to open."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path


@contextmanager
def used_up(pid: int, num_left: int) -> Iterator[None]:
    """Let a process open `num_left` more descriptors at most; at the end as many as before."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_limit(pid, num_left), hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _limit(pid: int, num_left: int) -> int:
    """Return the limit below which `num_left` numbers are free: it bounds the numbers, not how many are open."""
    opened = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(islice((number for number in count() if number not in opened), num_left, None))
