"""Which requests does a worker have, and what is known of each?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.v1 import types_pb2 as pb
from tandem_worker.streams import GatewayStream


@dataclass(eq=False)
class ActiveRequest:
    """One request between its Submit and its end on this worker; owned by the front, on its event loop."""

    submit: pb.Submit
    stream: GatewayStream
    ledger: pb.PhaseLedger = field(default_factory=pb.PhaseLedger)
    """Adds what the hand-over did (bytes, transport, times) to what the engine reports."""
    num_choices_open: int = 1
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The request's id in the engine: the gateway's id and attempt."""
        return f"{self.submit.request_id}.{self.submit.attempt}"

    @property
    def seconds_left(self) -> float:
        return self.submit.deadline_unix_ms / 1000 - time.time()


class RequestTable:
    """All active requests by engine id; ends each exactly once."""

    def __init__(self) -> None:
        self.num_so_far = 0
        self._requests: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._requests.values()))

    def get(self, key: str) -> ActiveRequest | None:
        return self._requests.get(key)

    def add(self, request: ActiveRequest) -> bool:
        """Return False, and change nothing, if the request is already here."""
        if request.key in self._requests:
            return False
        self._requests[request.key] = request
        self.num_so_far += 1
        self._idle.clear()
        return True

    def end(self, request: ActiveRequest) -> None:
        """Forget a request and run its `on_end` callbacks, once."""
        if self._requests.pop(request.key, None) is None:
            return
        callbacks, request.on_end = request.on_end, []
        for callback in callbacks:
            callback()
        if not self._requests:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
