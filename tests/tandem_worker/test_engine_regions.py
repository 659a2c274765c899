"""The engine maps the regions that it reads, and no mapping outlives its use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tandem_engine.messages import MapRegion, UnmapRegion
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.regions import RegionGrant, RegionKind
from tandem_worker.engine_link import EngineRegions
from tests.tandem_worker.kv_harness import FollowedLink, until
from tests.tandem_worker.scripted_engine import ScriptedEngine


class SlowLink(FollowedLink):
    """Grants every region once a test lets it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        self.num_fetched = 0

    async def fetch_region(self, region_id: str, kind: RegionKind = "host") -> RegionGrant:
        self.num_fetched += 1
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return RegionGrant(os.open(os.devnull, os.O_RDONLY), 4096, 1, 0)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    yield ScriptedEngine()


async def test_a_mapping_whose_caller_was_cancelled_is_unmapped_when_it_is_idle(engine: ScriptedEngine) -> None:
    """The mapping alone would keep a dead owner's whole pool."""
    link = SlowLink()
    regions = EngineRegions(engine, link, idle_seconds=0.01)
    caller = asyncio.create_task(regions.map(["r"]))
    await until(lambda: link.num_fetched == 1)
    caller.cancel()
    await asyncio.wait([caller])
    link.go_on.set()
    await until(lambda: engine.sent_of(UnmapRegion) == [UnmapRegion("r")])
    assert [type(command) for command in engine.sent] == [MapRegion, UnmapRegion]
    await link.close()


async def test_a_region_that_is_being_mapped_anew_is_not_forgotten(engine: ScriptedEngine) -> None:
    """A second failed copy unmaps the region while a third is waiting for it: the new mapping must have an end too."""
    link = SlowLink()
    regions = EngineRegions(engine, link, idle_seconds=0.01)
    caller = asyncio.create_task(regions.map(["r"]))
    await until(lambda: link.num_fetched == 1)
    regions.unmap(["r"])
    assert engine.sent == []
    link.go_on.set()
    await caller
    await until(lambda: engine.sent_of(UnmapRegion) == [UnmapRegion("r")])
    await link.close()


async def test_a_region_that_could_not_be_mapped_is_tried_again(engine: ScriptedEngine) -> None:
    link = SlowLink()
    link.go_on.set()
    link.error = Unavailable("the KV service restarts")
    regions = EngineRegions(engine, link)
    with pytest.raises(Unavailable):
        await regions.map(["r"])
    link.error = None
    await regions.map(["r"])
    assert link.num_fetched == 2 and len(engine.sent_of(MapRegion)) == 1
    regions.close()
    await link.close()
