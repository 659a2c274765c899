"""Sends many requests at once, more than workers and queues have room for, to both gateways.

Some are refused with 429; their clients come back after the seconds that the answer names, until each has its answer.
Those that the end of the run cuts off are not recorded.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.chaos.http_client import HttpStreamRecord
from tests.chaos.options import Options
from tests.chaos.rotations import until_either

_LATE_SECONDS = 2.0
"""So much later a request may be refused that came in a burst: the gateway was busy, and the answer late."""


@dataclass(frozen=True)
class Burst:
    """A burst that is over, with those of its requests that were answered."""

    records: Sequence[HttpStreamRecord]
    began: float
    """time.monotonic(), as `ended`."""
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def num_refused(self) -> int:
        return sum(record.num_overloaded > 0 for record in self.records)


class Bursts:
    """Owned by the run; `run` sends one burst after the other."""

    def __init__(
        self, send: Callable[[random.Random, int], Awaitable[HttpStreamRecord]], rng: random.Random, options: Options
    ) -> None:
        """`send` sends one request of a burst to its end; the number says which gateway comes first."""
        self.over: list[Burst] = []
        self._send = send
        self._rng = rng
        self._options = options
        self._began: float | None = None
        """Of the burst that is under way."""
        self._num_back = 0

    @property
    def num_cut_off(self) -> int:
        """Requests that the end of the run has cut off."""
        return sum(self._options.burst_size - len(burst.records) for burst in self.over)

    @property
    def has_more(self) -> bool:
        """Whether nobody has come back yet who was refused; in each run somebody does."""
        return self._options.burst_size > 0 and self._num_back == 0

    def were_under_way(self, since: float, until: float = float("inf")) -> bool:
        """Return whether the fleet was overloaded at some time between two times of `time.monotonic`."""
        is_now = self._began is not None and self._began <= until
        return is_now or any(burst.began <= until and burst.ended + _LATE_SECONDS >= since for burst in self.over)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Send bursts until `is_over()`. Each goes on until all of its requests are answered, or to the end."""
        while self._options.burst_size and not is_over():
            pause = self._rng.uniform(*self._options.burst_pause_seconds)
            await until_either(lambda: False, is_over, pause)
            if not is_over():
                await self._burst(is_over)

    async def _burst(self, is_over: Callable[[], bool]) -> None:
        self._began = began = time.monotonic()
        records: list[HttpStreamRecord] = []
        sends = [asyncio.create_task(self._send_one(number, records)) for number in range(self._options.burst_size)]
        try:
            await until_either(lambda: all(send.done() for send in sends), is_over, float("inf"))
        finally:
            for send in sends:
                send.cancel()
            ends = await asyncio.gather(*sends, return_exceptions=True)
            self.over.append(Burst(records, began, time.monotonic()))
            self._began = None
        for error in ends:
            if isinstance(error, Exception):
                raise error

    async def _send_one(self, number: int, records: list[HttpStreamRecord]) -> None:
        record = await self._send(self._rng, number)
        records.append(record)
        self._num_back += record.num_overloaded > 0
