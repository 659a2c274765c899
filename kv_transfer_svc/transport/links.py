"""Which peers does this service read from, and how well does that go?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_transfer_svc.transport.link import Link, Reader
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.client import LEASE_SECONDS, KvClient

TRANSPORTS = ("shm", "tcp", "grpc")
"""All there are, best first."""

_CALL_SECONDS = 2.0
"""Of calls to peers: the reader that waits for the answer has a deadline of its own."""
_NUM_THREADS = 16
_SHOWN_SECONDS = 600.0
"""After so long without use a link is nobody's concern: its peer may have been gone for as long."""


class Links:
    """One link per peer, made at first need. Owned by the puller; others may read through it too."""

    def __init__(
        self,
        incarnation: str,
        handle_key: Callable[[], bytes],
        *,
        transports: Sequence[str] = ("grpc",),
        host_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
        counters: Counter[str] | None = None,
    ) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-receive")
        self._reader = Reader(
            incarnation,
            host_id,
            transports,
            handle_key,
            clock,
            Counter() if counters is None else counters,
            self._threads,
        )
        self._lease_seconds = lease_seconds
        self._links: dict[str, Link] = {}

    def to(self, address: str) -> Link:
        """Return the link to the service at `address`."""
        if address not in self._links:
            client = KvClient(
                address, self._reader.incarnation, call_seconds=_CALL_SECONDS, lease_seconds=self._lease_seconds
            )
            self._links[address] = Link(self._reader, client)
        return self._links[address]

    def report(self) -> list[pb.KvLink]:
        """Say how each link does that was used lately; may be called from any thread."""
        return [link.report() for link in list(self._links.values()) if link.idle_seconds < _SHOWN_SECONDS]

    async def close(self) -> None:
        """Hang up on all; reads must have ended before."""
        for link in self._links.values():
            await link.close()
        self._threads.shutdown(wait=False)
