"""The readers of the live stream: each gets the same frames, and a slow one starts over instead of falling behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from tandem_runtime.errors import Overloaded

MAX_VIEWERS = 64
_MAX_WAITING_FRAMES = 64
_RETRY_SECONDS = 10.0
_STREAM_SECONDS = 900.0
"""After so long a stream ends, and the page asks again: a token that was revoked is refused then."""


class TooManyViewers(Overloaded):
    """The gateway shows its live page to as many readers as it may."""


class Viewer:
    """One reader: the frames that wait for it."""

    def __init__(self, beginning: Callable[[], Sequence[bytes]]) -> None:
        """`beginning` returns the frames that bring a reader who has seen nothing to the present."""
        self._beginning = beginning
        self._waiting: deque[bytes] = deque(beginning())
        self._news = asyncio.Event()
        self._is_over = False

    def put(self, frame: bytes) -> None:
        """Add a frame. A reader that has 64 of them unread gets the present state instead, once it reads again."""
        if len(self._waiting) >= _MAX_WAITING_FRAMES:
            self._waiting.clear()
            self._waiting.extend(self._beginning())
        else:
            self._waiting.append(frame)
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames until the feed ends, for 15 minutes at most; then the stream ends as a complete one."""
        until = asyncio.get_running_loop().time() + _STREAM_SECONDS
        while True:
            self._news.clear()  # before the look at what waits: news of the meantime wake the wait below
            while self._waiting and not self._is_over:
                yield self._waiting.popleft()
            if self._is_over:
                return
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return


class Viewers:
    """All readers of one gateway, at most 64."""

    def __init__(self, beginning: Callable[[], Sequence[bytes]], max_viewers: int = MAX_VIEWERS) -> None:
        self._beginning = beginning
        self._max_viewers = max_viewers
        self._viewers: set[Viewer] = set()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """Return a new reader; raise TooManyViewers if there are as many as may be."""
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(
                f"{self._max_viewers} readers have the live page open, which is the most this gateway serves; "
                "close one of them",
                retry_after_seconds=_RETRY_SECONDS,
            )
        viewer = Viewer(self._beginning)
        if self._is_over:
            viewer.end()
        else:
            self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)

    def send(self, frame: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(frame)

    def end(self) -> None:
        """End every stream, and each that begins from now on."""
        self._is_over = True
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()
