"""Keeps the event loop of a fuzzing process."""

from __future__ import annotations

import asyncio

_LOOPS: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of this process: a new one for each input would cost more than the parser."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]
