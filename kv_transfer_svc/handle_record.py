"""The record of one handle, and the events that its readers receive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_transfer_svc.copied_slabs import CopiedSlabs
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.layout import check_layout
from tandem_runtime.kv.slabs import trim_slab
from tandem_runtime.kv_handle import HandleMachine


class Broadcast:
    """Wakes every current waiter.

    A waiter calls `next()`, then reads the state, then waits; in this order it misses no change.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        return self._event


@dataclass(eq=False)
class HandleRecord:
    """A handle with its state machine and its watchers. Only the store changes the record."""

    handle: pb.KvHandle
    machine: HandleMachine
    is_copy: bool = False
    """Whether this is another service's handle, pulled for readers of this host."""
    is_windowed: bool = False
    """Whether the memory of this copy's slabs is freed as its readers acknowledge them."""
    transport: str = "shm"
    """The transport that brought the bytes to this service, as in `--transports`; the pull sets it for a copy."""
    region_id: str = ""
    layout: pb.KvLayout | None = None
    """The writer's layout; None until the writer has reserved."""
    num_bytes: int = 0
    max_held_bytes: int = 0
    """The most bytes of this handle that the writer's region holds at once; 0: it holds all of them."""
    copied: CopiedSlabs = field(default_factory=CopiedSlabs)
    """With `max_held_bytes`."""
    has_silent_reader: bool = False
    """Whether a reader watches that acknowledges nothing."""
    checksums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums by (slab, block), computed here at the first read of slabs that were sealed without checksums."""
    changed: Broadcast = field(default_factory=Broadcast)
    readers: dict[str, str] = field(default_factory=dict)
    """The incarnation of every reader that ever watched."""
    watching: Counter[str] = field(default_factory=Counter)
    """Number of open streams per reader; the lease of such a reader is renewed."""

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

    async def events(
        self, layout: pb.KvLayout, first_block: int, skipped: Callable[[int], None] = lambda index: None
    ) -> AsyncIterator[kv.WatchEvent]:
        """Yield the events of one reader; the last is `closed`, or the error that ended the handle.

        Calls `skipped` with the index of each slab that the reader does not need. Raises FingerprintMismatch, before
        any slab, if the writer's layout differs from `layout`.
        """
        num_seen = num_sent = 0
        while True:
            changed = self.changed.next()
            if self.machine.end_error is not None:
                yield kv.WatchEvent(error=self.machine.end_error.to_proto())
                return
            if self.layout is not None:
                check_layout(layout, self.layout)
            while num_seen < len(self.machine.slabs):  # a slab may be sealed while another is sent
                slab = self.machine.slabs[num_seen]
                num_seen += 1
                if (needed := trim_slab(slab, first_block)) is None:
                    skipped(slab.index)
                else:
                    num_sent += 1
                    is_window = self.is_windowed or self.max_held_bytes > 0
                    yield kv.WatchEvent(slab=needed, transport=self.transport, is_window=is_window)
            if self.machine.end_error is None and self.machine.closed is not None:
                yield self._closing(num_sent)
                return
            await changed.wait()

    def _closing(self, num_sent: int) -> kv.WatchEvent:
        """Return the last event. `num_slabs` counts the slabs sent to this reader, which waits for as many imports."""
        closed = kv.Closed()
        assert self.machine.closed is not None, "only a closed handle has a closing event"
        closed.CopyFrom(self.machine.closed)
        closed.num_slabs = num_sent
        return kv.WatchEvent(closed=closed, transport=self.transport)


def handle_name(handle: pb.KvHandle) -> str:
    return f"KV handle of request {handle.request_id} attempt {handle.attempt}"
