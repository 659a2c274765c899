"""What does the service keep of one handle, and how do its readers hear of it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_transfer_svc.broadcast import Broadcast
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.layout import check_layout
from tandem_runtime.kv.slabs import trim_slab
from tandem_runtime.kv_handle import HandleMachine


@dataclass(eq=False)
class Record:
    """A handle, its machine and whoever watches it. Only the store changes it."""

    handle: pb.KvHandle
    machine: HandleMachine
    is_copy: bool = False
    """Whether it is another service's handle, pulled for readers here."""
    transport: str = "shm"
    """How its bytes came to this service, as in `--transports`; of a copy the pull says so."""
    region_id: str = ""
    layout: pb.KvLayout | None = None
    """Of the writer; None until it has reserved."""
    num_bytes: int = 0
    checksums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Made here as blocks were read, by slab and block: of slabs that their writer sealed without."""
    changed: Broadcast = field(default_factory=Broadcast)
    readers: dict[str, str] = field(default_factory=dict)
    """Incarnations of those that ever watched, by reader."""
    watching: Counter[str] = field(default_factory=Counter)
    """Readers with an open stream: their leases are renewed while it is."""

    @contextmanager
    def watched_by(self, reader_id: str) -> Iterator[None]:
        self.watching[reader_id] += 1
        try:
            yield
        finally:
            self.watching[reader_id] -= 1

    async def wait_ended(self) -> None:
        while True:
            changed = self.changed.next()
            if self.machine.ended:
                return
            await changed.wait()

    async def events(self, layout: pb.KvLayout, first_block: int) -> AsyncIterator[kv.WatchEvent]:
        """Yield what one reader sees, its end included: closed, or the error that ended the handle.

        Raises FingerprintMismatch, before any slab, if the writer's layout is another.
        """
        num_seen = num_sent = 0
        while True:
            changed = self.changed.next()
            if self.machine.end_error is not None:
                yield kv.WatchEvent(error=self.machine.end_error.to_proto())
                return
            if self.layout is not None:
                check_layout(layout, self.layout)
            while num_seen < len(self.machine.slabs):  # more may be sealed while one is sent
                slab = self.machine.slabs[num_seen]
                num_seen += 1
                if (needed := trim_slab(slab, first_block)) is not None:
                    num_sent += 1
                    yield kv.WatchEvent(slab=needed, transport=self.transport)
            if self.machine.end_error is None and self.machine.closed is not None:
                yield self._closing(num_sent)
                return
            await changed.wait()

    def _closing(self, num_sent: int) -> kv.WatchEvent:
        """`num_slabs` counts those sent to this reader: it waits for so many imports."""
        closed = kv.Closed()
        assert self.machine.closed is not None, "only a closed handle has a last event"
        closed.CopyFrom(self.machine.closed)
        closed.num_slabs = num_sent
        return kv.WatchEvent(closed=closed, transport=self.transport)


def handle_name(handle: pb.KvHandle) -> str:
    return f"KV handle of request {handle.request_id} attempt {handle.attempt}"
