"""A worker follows the KV service of its host through restarts, and detects its loss."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

import pytest
import structlog

from tandem_engine.messages import MapRegion, UnmapRegion
from tandem_runtime.errors import InvalidRequest, Unavailable, Unsupported
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_worker.engine_link import EngineRegions
from tandem_worker.kv_link import LentPool, lost_is_unavailable
from tests.kv_transfer_svc.host import running_host
from tests.tandem_worker.kv_harness import FollowedLink, until
from tests.tandem_worker.scripted_engine import ScriptedEngine


async def test_a_region_is_lent_to_every_life_of_the_kv_service(tmp_path: Path) -> None:
    region = SharedRegion.create("test-pool", 8192, 1)
    offer = LentPool("mine", region.total_bytes, 1, 8192, region.generations_offset, os.dup(region.fd))
    async with running_host(tmp_path) as first, running_host(tmp_path) as second:
        link = FollowedLink(first)
        link.lend(offer)
        await asyncio.wait_for(link.wait_lent(), 10)
        client, incarnation = await link.wait_client()
        assert (link.address, incarnation) == (first.address, first.incarnation)
        link.move(second)
        await asyncio.wait_for(link.wait_gone(client), 10)
        await asyncio.wait_for(link.wait_lent(), 10)
        grant = await link.fetch_region("mine")
        os.close(grant.fd)
        assert (grant.num_slots, link.address) == (1, second.address)
        await link.close()
        await link.close()
    region.close()


async def test_a_pool_in_device_memory_is_lent_and_mapped_with_both_descriptors(tmp_path: Path) -> None:
    generations = SharedRegion.create("test-generations", 0, 1)
    memory, other_end = os.pipe()
    engine = ScriptedEngine()
    async with running_host(tmp_path) as host:
        link = FollowedLink(host)
        link.lend(LentPool("mine", 8192, 1, 8192, 0, os.dup(generations.fd), os.dup(memory)))
        await asyncio.wait_for(link.wait_lent(), 10)
        regions = EngineRegions(engine, link, idle_seconds=0.01)
        with pytest.raises(Unsupported, match="MEMORY_KIND_DEVICE"):
            await regions.map(["mine"])
        await regions.map(["mine"], "device")
        await until(lambda: engine.sent_of(UnmapRegion) == [UnmapRegion("mine")])
        assert engine.sent_of(MapRegion) == [MapRegion("mine", 8192, 1, 0, "device")]
        assert engine.num_descriptors == [2, 0]
        await link.close()
        generations.close()
        os.close(memory)
        await until(lambda: not is_read(other_end))  # neither this link nor the service has a copy left
    os.close(other_end)


def is_read(end_of_pipe: int) -> bool:
    """Return whether any descriptor of the pipe's other end is open."""
    asking = select.poll()
    asking.register(end_of_pipe, 0)
    return not any(events & select.POLLERR for _, events in asking.poll(0))


async def test_whoever_asks_hears_of_every_change_of_address(tmp_path: Path) -> None:
    addresses: list[str] = []
    async with running_host(tmp_path) as host:
        link = FollowedLink(host, on_change=lambda: addresses.append(link.address))
        await link.wait_client()
        await until(lambda: addresses == [host.address])
        await link.disconnect()
        assert addresses[1] == ""
        await link.close()


async def test_a_worker_whose_container_lacks_the_service_s_socket_is_told_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host's network, two containers have one host id, and each has a /tmp of its own."""
    monkeypatch.setattr("tandem_worker.kv_link._HIDDEN_SECONDS", 0.3)
    async with running_host(tmp_path) as host:
        monkeypatch.setattr(type(host), "socket", str(tmp_path / "elsewhere" / "kv.sock"))
        link = FollowedLink(host)
        region = SharedRegion.create("test-pool", 8192, 1)
        link.lend(LentPool("mine", region.total_bytes, 1, 8192, region.generations_offset, os.dup(region.fd)))
        with structlog.testing.capture_logs() as lines, pytest.raises(InvalidRequest, match="TANDEM_RUNTIME_DIR"):
            await asyncio.wait_for(link.wait_lent(), 10)
        assert [line["event"] for line in lines].count("kv_service_unreachable") == 1
        # As soon as the socket is there, all is well.
        monkeypatch.undo()
        await asyncio.wait_for(link.wait_client(), 10)
        await link.wait_lent()
        await link.close()


async def test_a_worker_that_waits_for_its_host_s_kv_service_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another --host-id than the service's, a worker waited for ever, without a word."""
    monkeypatch.setattr("tandem_worker.kv_link._HIDDEN_SECONDS", 0.05)
    region = SharedRegion.create("test-pool", 8192, 1)
    async with running_host(tmp_path) as host:
        link = FollowedLink(None)
        link.lend(LentPool("mine", region.total_bytes, 1, 8192, region.generations_offset, os.dup(region.fd)))
        with structlog.testing.capture_logs() as lines:
            lent = asyncio.create_task(link.wait_lent())
            await until(lambda: [line["event"] for line in lines] == ["kv_service_awaited"])
            assert "--host-id" in lines[0]["remedy"] and not lent.done()
        link.move(host)
        await asyncio.wait_for(lent, 10)
        await link.close()
    region.close()


async def test_a_kv_service_that_cannot_be_reached_is_tried_again(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        link = FollowedLink(host)
        link.lend(LentPool("bad", 1, 1, 1, 0, os.open(os.devnull, os.O_RDONLY)))
        with pytest.raises(Unavailable):
            link.client()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.wait_lent(), 0.5)
        region = SharedRegion.create("test-pool", 8192, 1)
        link.lend(LentPool("good", region.total_bytes, 1, 8192, region.generations_offset, os.dup(region.fd)))
        await asyncio.wait_for(link.wait_lent(), 10)
        await link.close()
        region.close()


async def test_a_call_cancelled_from_outside_stays_cancelled() -> None:
    async def call() -> None:
        with lost_is_unavailable():
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_cancelled_under_its_task_is_an_error() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    with pytest.raises(Unavailable, match="lost"), lost_is_unavailable():
        await future
