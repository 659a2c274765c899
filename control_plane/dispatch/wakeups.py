"""When are those woken who wait for tokens?

At once, as long as that takes no time to speak of. With hundreds of streams it does: each writes to its socket, and the
tokens of the next steps wait meanwhile. So after a round of some milliseconds the gateway reads for as long before it
wakes again, and a stream then writes all that has come for it in one piece. The more there is to do, the less a token
costs; it waits for no longer than the last round took.
"""

from __future__ import annotations

import asyncio

_SHORTEST_PAUSE_SECONDS = 0.001
"""Below it a pause gathers too little to be worth a timer, whose ticks are as long."""
_LONGEST_PAUSE_SECONDS = 0.02


class Pace:
    """Rounds of waking, of all streams of one event loop."""

    def __init__(self) -> None:
        self._due: list[asyncio.Future[None]] = []
        self._is_round_coming = False
        self._round_began = 0.0
        self._rest_until = 0.0

    def wake(self, waiting: asyncio.Future[None]) -> None:
        """Set the result of `waiting` in the next round, unless it is done by then."""
        self._due.append(waiting)
        if not self._is_round_coming:
            self._arrange_round()

    def _arrange_round(self) -> None:
        self._is_round_coming = True
        loop = asyncio.get_running_loop()
        if self._rest_until > loop.time():
            loop.call_at(self._rest_until, self._round)
        else:
            loop.call_soon(self._round)

    def _round(self) -> None:
        loop = asyncio.get_running_loop()
        self._round_began = loop.time()
        due, self._due = self._due, []
        for waiting in due:
            if not waiting.done():
                waiting.set_result(None)
        loop.call_soon(self._round_is_over)  # behind all that have just been woken

    def _round_is_over(self) -> None:
        now = asyncio.get_running_loop().time()
        took = now - self._round_began
        self._rest_until = now + min(took, _LONGEST_PAUSE_SECONDS) if took >= _SHORTEST_PAUSE_SECONDS else now
        self._is_round_coming = False
        if self._due:
            self._arrange_round()
