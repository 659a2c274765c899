"""Prints the steps of an installation with their seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what was done, and how long the block took; nothing if it raises."""
    started = time.monotonic()
    yield
    print(f"  {what}: {time.monotonic() - started:.1f} s", flush=True)
