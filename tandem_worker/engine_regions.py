"""Which regions of other processes has our engine mapped?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tandem_engine import messages
from tandem_worker.engine_link import EngineLink
from tandem_worker.kv_link import KvLink

_IDLE_SECONDS = 60.0
"""A region that nobody read for so long is unmapped: a mapping keeps the memory of its owner alive, a dead one's too.
Mapping it again takes a millisecond."""


@dataclass(eq=False)
class _Mapping:
    """A region that the engine has mapped, or is about to."""

    task: asyncio.Task[None]
    expiry: asyncio.TimerHandle | None = None

    def unmap_later(self, seconds: float, unmap: Callable[[], None]) -> None:
        self.keep()
        self.expiry = asyncio.get_running_loop().call_later(seconds, unmap)

    def keep(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()


class EngineRegions:
    """Has the engine map regions as they are needed, and forget those that no longer are."""

    def __init__(self, engine: EngineLink, link: KvLink, idle_seconds: float = _IDLE_SECONDS) -> None:
        self.idle_seconds = idle_seconds
        self._engine = engine
        self._link = link
        self._mapped: dict[str, _Mapping] = {}

    async def map(self, region_ids: Iterable[str]) -> None:
        """Have the engine map these regions; raises Unavailable or KvNotFound."""
        for region_id in set(region_ids):
            mapping = self._mapped.get(region_id)
            if mapping is None:
                mapping = self._mapped[region_id] = _Mapping(asyncio.create_task(self._map(region_id)))
            try:
                await asyncio.shield(mapping.task)
            except Exception:
                if self._mapped.get(region_id) is mapping:  # whoever comes next asks again
                    del self._mapped[region_id]
                raise
            mapping.unmap_later(self.idle_seconds, partial(self.unmap, [region_id]))

    def unmap(self, region_ids: Iterable[str]) -> None:
        """Have the engine forget regions: unused for long, their owner dead perhaps, or mapped wrongly."""
        for region_id in region_ids:
            if (mapping := self._mapped.pop(region_id, None)) is not None:
                mapping.keep()
                self._engine.send(messages.UnmapRegion(region_id))

    def close(self) -> None:
        for mapping in self._mapped.values():
            mapping.keep()
            mapping.task.cancel()

    async def _map(self, region_id: str) -> None:
        grant = await self._link.fetch(region_id)
        try:
            self._engine.send(
                messages.MapRegion(region_id, grant.num_bytes, grant.num_slots, grant.generations_offset), grant.fd
            )
        finally:
            os.close(grant.fd)
