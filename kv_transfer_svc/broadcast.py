"""How do streams learn that what they show has changed?"""

from __future__ import annotations

import asyncio


class Broadcast:
    """Wakes everyone who waits now. Take `next()` first, look second, wait third: then no change is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        return self._event
