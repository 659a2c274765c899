"""Commands to the engine process, and the regions of other processes that the engine has mapped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tandem_engine import messages
from tandem_engine.channel import ChannelClosed, Received
from tandem_engine.client import EngineClient
from tandem_engine.encoder.messages import EncoderCommand
from tandem_runtime.kv.packets import close_all
from tandem_runtime.kv.regions import RegionKind
from tandem_runtime.log import get_logger
from tandem_worker.kv_link import KvLink

log = get_logger(__name__)

_IDLE_SECONDS = 60.0
"""Seconds without a read before a region is unmapped. A mapping keeps the owner's memory allocated, even after the
owner's death. Mapping a region again takes a millisecond."""
_IDLE_DEVICE_SECONDS = 5.0
"""The same for a region in device memory: a prefill worker that starts anew needs the memory of its former life."""


class EngineLink:
    """Sends commands to one engine process and yields its events; `send` never blocks and never fails.

    A command to a dead engine is dropped: the engine's death arrives as an event and ends every request.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @property
    def pid(self) -> int:
        return self._client.pid

    def send(self, command: messages.Command | EncoderCommand, *fds: int) -> None:
        """Send a command after those sent before. Descriptors are duplicated and stay the caller's."""
        try:
            self._client.send(command, *fds)
        except ChannelClosed:
            log.debug("command_dropped_engine_dead", command=type(command).__name__)
        except Exception:  # a command that cannot be sent must not stop the commands after it
            log.exception("command_not_sent", command=type(command).__name__)

    def events(self) -> AsyncIterator[Received]:
        """Yield (event, descriptors) until the engine ends. For one reader."""
        return self._client.events()

    async def stop(self) -> None:
        await self._client.stop()


@dataclass(eq=False)
class _Mapping:
    """A region that the engine has mapped, or is about to map."""

    task: asyncio.Task[None]
    idle_seconds: float
    expiry: asyncio.TimerHandle | None = None

    def unmap_later(self, unmap: Callable[[], None]) -> None:
        self.cancel_expiry()
        self.expiry = asyncio.get_running_loop().call_later(self.idle_seconds, unmap)

    def cancel_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()


class EngineRegions:
    """Has the engine map regions when they are needed, and unmap them when they have been idle."""

    def __init__(self, engine: EngineLink, link: KvLink, idle_seconds: float = _IDLE_SECONDS) -> None:
        self.idle_seconds = idle_seconds
        self._engine = engine
        self._link = link
        self._mapped: dict[str, _Mapping] = {}

    async def map(self, region_ids: Iterable[str], kind: RegionKind = "host") -> None:
        """Have the engine map these regions of one kind; raises Unavailable, KvNotFound or Unsupported."""
        for region_id in set(region_ids):
            mapping = self._mapped.get(region_id) or self._begin(region_id, kind)
            await asyncio.shield(mapping.task)
            self._unmap_later(region_id, mapping)

    def unmap(self, region_ids: Iterable[str]) -> None:
        """Have the engine unmap regions that are idle or could not be read; their owner may be dead."""
        for region_id in region_ids:
            mapping = self._mapped.get(region_id)
            if mapping is not None and mapping.task.done():  # else it is being mapped anew: nothing to unmap yet
                del self._mapped[region_id]
                mapping.cancel_expiry()
                self._engine.send(messages.UnmapRegion(region_id))

    def close(self) -> None:
        mapped, self._mapped = self._mapped, {}
        for mapping in mapped.values():
            mapping.cancel_expiry()
            mapping.task.cancel()

    def _begin(self, region_id: str, kind: RegionKind) -> _Mapping:
        seconds = self.idle_seconds if kind == "host" else min(self.idle_seconds, _IDLE_DEVICE_SECONDS)
        task = asyncio.create_task(self._map(region_id, kind))
        mapping = self._mapped[region_id] = _Mapping(task, seconds)
        mapping.task.add_done_callback(lambda task: self._mapping_ended(region_id, mapping))
        return mapping

    def _mapping_ended(self, region_id: str, mapping: _Mapping) -> None:
        """Give a new mapping its end, even if every caller was cancelled meanwhile; forget one that failed."""
        if not mapping.task.cancelled() and mapping.task.exception() is None:
            self._unmap_later(region_id, mapping)
        elif self._mapped.get(region_id) is mapping:
            del self._mapped[region_id]  # the next caller tries again

    def _unmap_later(self, region_id: str, mapping: _Mapping) -> None:
        if self._mapped.get(region_id) is mapping:
            mapping.unmap_later(partial(self.unmap, [region_id]))

    async def _map(self, region_id: str, kind: RegionKind) -> None:
        grant = await self._link.fetch_region(region_id, kind)
        sizes = grant.num_bytes, grant.num_slots, grant.generations_offset
        try:
            self._engine.send(messages.MapRegion(region_id, *sizes, grant.kind), *grant.fds)
        finally:
            close_all(grant.fds)
