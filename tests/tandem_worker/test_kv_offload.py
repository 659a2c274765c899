"""A worker loads only the blocks that a request may read, and publishes blocks under the right account."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import AddRequest, FilledBlocks, MapRegion
from tandem_runtime.kv.client import MAX_BLOCKS_PER_CALL
from tandem_runtime.kv.regions import RegionGrant, RegionKind
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_worker import convert, kv_offload
from tandem_worker.engine_link import EngineRegions
from tandem_worker.kv_link import LentPool
from tandem_worker.kv_offload import KVOffload, lookup_seconds
from tandem_worker.requests import ActiveRequest, GatewayStream
from tests.kv_transfer_svc import host as kv_host
from tests.kv_transfer_svc.host import Host, running_host
from tests.tandem_worker.kv_harness import FollowedLink, until
from tests.tandem_worker.scripted_engine import LAYOUT, ScriptedEngine, ready

BLOCK = LAYOUT.tokens_per_block
NUM_BLOCKS = 8
HASHES = [bytes([index]) * 16 for index in range(NUM_BLOCKS)]


class Harness:
    """A KVOffload between a scripted engine and a real KV service; records the calls of the service."""

    def __init__(self, host: Host) -> None:
        self.loads: list[kv.LoadRequest] = []
        self.publishes: list[kv.PublishRequest] = []
        self.engine = ScriptedEngine()
        self.link = FollowedLink(host)
        self.offload = KVOffload(self.engine, self.link, EngineRegions(self.engine, self.link), "worker-1")
        self.region = SharedRegion.create("test-pool", NUM_BLOCKS * LAYOUT.bytes_per_block, NUM_BLOCKS)
        load, publish = host.host_cache.load, host.host_cache.publish

        async def recorded_load(request: kv.LoadRequest) -> kv.LoadReply:
            self.loads.append(request)
            return await load(request)

        async def recorded_publish(request: kv.PublishRequest) -> kv.PublishReply:
            self.publishes.append(request)
            return await publish(request)

        host.host_cache.load = recorded_load  # type: ignore[method-assign]
        host.host_cache.publish = recorded_publish  # type: ignore[method-assign]

    async def lend(self) -> None:
        region = self.region
        offer = LentPool(
            "pool", region.total_bytes, NUM_BLOCKS, LAYOUT.bytes_per_block, region.generations_offset, os.dup(region.fd)
        )
        self.link.lend(offer)
        await asyncio.wait_for(self.link.wait_lent(), 10)
        self.offload.on_ready(ready("pool"))

    async def added(self, submit: pb.Submit) -> AddRequest:
        """Add a request; return the command that the engine receives."""
        num_before = len(self.engine.sent_of(AddRequest))
        request = ActiveRequest(submit, GatewayStream())
        self.offload.add(request, convert.add_request(submit, request.key, "aggregated"))
        await until(lambda: len(self.engine.sent_of(AddRequest)) > num_before)
        self.offload.on_admitted([request.key])
        command: AddRequest = self.engine.sent_of(AddRequest)[-1]
        return command

    async def fill(self, submit: pb.Submit, first: int, num_blocks: int) -> None:
        """Report filled blocks, and wait until the store has them."""
        num_expected = self.offload.counters["prompt_cache_blocks_published"] + num_blocks
        slots = list(range(first, first + num_blocks))
        hashes = [block_hash.hex() for block_hash in HASHES[first : first + num_blocks]]
        parent = HASHES[first - 1].hex() if first else ""
        generations = [self.region.generation(slot) for slot in slots]
        filled = FilledBlocks(submit.request_id, parent, hashes, slots, generations, region_id="pool")
        self.offload.on_filled(ActiveRequest(submit, GatewayStream()), filled)
        await until(lambda: self.offload.counters["prompt_cache_blocks_published"] == num_expected)

    async def fill_late(self, request_id: str, first: int, num_expected: int) -> None:
        """Report one block of a request that is over; wait until the store has so many."""
        generation = self.region.generation(first)
        filled = FilledBlocks(request_id, "", [HASHES[first].hex()], [first], [generation], region_id="pool")
        self.offload.on_filled(None, filled)
        await until(lambda: self.offload.counters["prompt_cache_blocks_published"] == num_expected)


@asynccontextmanager
async def harness(folder: Path) -> AsyncIterator[Harness]:
    async with running_host(folder) as host:
        here = Harness(host)
        try:
            await here.lend()
            yield here
        finally:
            await here.offload.close()
            await here.link.close()
            here.region.close()


def a_submit(num_tokens: int = NUM_BLOCKS * BLOCK, **fields: Any) -> pb.Submit:
    return pb.Submit(
        request_id="r",
        token_ids=range(num_tokens),
        num_prompt_tokens=num_tokens,
        sampling=pb.SamplingParams(max_tokens=4, top_p=1, repetition_penalty=1),
        hash_root=b"r" * 16,
        block_hashes=HASHES[: num_tokens // BLOCK],
        account_tag=b"account!",
        **fields,
    )


def tags(publishes: list[kv.PublishRequest]) -> list[tuple[bytes, bytes, list[bytes]]]:
    return [(each.account_tag, each.parent_hash, [block.block_hash for block in each.blocks]) for each in publishes]


async def test_blocks_in_device_memory_are_never_published_but_those_of_others_are_loaded(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, 2)
        here.offload.on_ready(replace(ready("pool"), region_kind="device"))
        filled = FilledBlocks("r", HASHES[1].hex(), [HASHES[2].hex()], [2], [0])
        here.offload.on_filled(ActiveRequest(a_submit(), GatewayStream()), filled)
        assert len((await here.added(a_submit())).prefix) == 2
        assert len(here.publishes) == 1


async def test_the_store_is_asked_for_what_may_be_found_and_never_for_the_last_token(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        for submit, num_found in (
            (a_submit(), NUM_BLOCKS - 1),
            (a_submit(NUM_BLOCKS * BLOCK - 1), NUM_BLOCKS - 1),
            (a_submit(max_found_blocks=3), 3),
            (a_submit(max_found_blocks=100), NUM_BLOCKS - 1),
            (a_submit(max_left_blocks=0), NUM_BLOCKS - 1),
        ):
            command = await here.added(submit)
            assert [block.index for block in command.prefix] == list(range(num_found))
            assert len(here.loads[-1].block_hashes) == num_found


def test_a_lookup_may_take_longer_the_more_blocks_it_is_about() -> None:
    here = pb.Submit()
    assert lookup_seconds(0, here) == 0.25
    assert lookup_seconds(8191, here) > 4.0  # the disk reads as many in 1.2 s
    assert lookup_seconds(100, pb.Submit(prefix_source="far:1")) > lookup_seconds(100, here)


def test_another_hosts_store_is_waited_for_as_long_as_the_gateway_says() -> None:
    for wait_ms, seconds in ((0, 0.25), (100, 0.25), (700, 0.7), (60_000, 2.0)):
        assert lookup_seconds(0, pb.Submit(prefix_source="far:1", prefix_wait_ms=wait_ms)) == seconds
    assert lookup_seconds(0, pb.Submit(prefix_source="far:1")) == 2.0, "a gateway of an earlier release"


async def test_a_region_that_does_not_come_delays_no_request_and_serves_the_next_one_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV service without free descriptors answers late; the request is computed here meanwhile."""
    monkeypatch.setattr(kv_offload, "_MAP_SECONDS", 0.02)
    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        fetch, may_come, has_come = here.link.fetch_region, asyncio.Event(), asyncio.Event()

        async def late(region_id: str, kind: RegionKind = "host") -> RegionGrant:
            await may_come.wait()
            grant = await fetch(region_id, kind)
            has_come.set()
            return grant

        here.link.fetch_region = late  # type: ignore[method-assign]
        assert (await here.added(a_submit())).prefix == []
        assert here.offload.counters["prompt_cache_failures"] == 1
        may_come.set()
        await has_come.wait()
        here.link.fetch_region = fetch  # type: ignore[method-assign]
        assert len((await here.added(a_submit())).prefix) == NUM_BLOCKS - 1
        assert len(here.engine.sent_of(MapRegion)) == 1


async def test_what_was_lent_before_the_deadline_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_offload, "MAX_BLOCKS_PER_CALL", 2)
    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        host = here.link.host
        assert host is not None
        load, is_over = host.host_cache.load, asyncio.Event()

        async def load_four_blocks(request: kv.LoadRequest) -> kv.LoadReply:
            if request.block_hashes[0] == HASHES[4]:
                await is_over.wait()
            return await load(request)

        monkeypatch.setattr(host.host_cache, "load", load_four_blocks)
        command = await here.added(a_submit())
        assert [block.index for block in command.prefix] == [0, 1, 2, 3]
        assert here.offload.counters["prompt_cache_failures"] == 1
        is_over.set()


async def test_a_lookup_that_fails_in_whatever_way_leaves_no_request_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by chaos: a worker without free file descriptors never answered, and gateways waited for 10 s."""

    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        monkeypatch.setattr("tandem_runtime.kv.packets.socket.socket", no_socket)
        with capture_logs() as lines:
            assert (await here.added(a_submit())).prefix == []
        assert [(line["log_level"], "Too many open files" in line["error"]) for line in lines] == [("info", True)]
        monkeypatch.undo()

        async def broken(*_: object) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(here.offload, "_load_prefix", broken)
        with capture_logs() as lines:
            assert (await here.added(a_submit())).prefix == []
        assert [(line["event"], line["log_level"]) for line in lines] == [("prompt_cache_lookup_failed", "error")]
        assert here.offload.counters["prompt_cache_failures"] == 2


async def test_a_request_that_must_not_find_does_not_ask(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        for submit in (a_submit(max_found_blocks=0), a_submit(BLOCK)):
            assert (await here.added(submit)).prefix == []
        assert here.loads == [] and here.offload.counters["prompt_cache_lookups"] == 0


async def test_public_blocks_count_towards_no_account(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        submit = a_submit(num_public_blocks=3)
        # 1. A run of public and private blocks is published in two calls, in order.
        await here.fill(submit, 0, 5)
        assert tags(here.publishes) == [(b"public", b"", HASHES[:3]), (b"account!", HASHES[2], HASHES[3:5])]
        # 2. Later blocks count towards the account.
        await here.fill(submit, 5, 2)
        assert tags(here.publishes)[2:] == [(b"account!", HASHES[4], HASHES[5:7])]
        # 3. A reader loads all of them as one chain.
        assert len((await here.added(submit)).prefix) == 7


async def test_a_store_that_has_nothing_of_a_prompt_is_not_asked_and_one_that_has_is(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        assert (await here.added(a_submit())).prefix == [] and here.loads == []
        await here.fill(a_submit(), 0, 2)
        assert [block.index for block in (await here.added(a_submit())).prefix] == [0, 1]
        await here.added(a_submit(prefix_source="127.0.0.1:1"))
        assert len(here.loads) == 2


async def test_a_prompt_of_more_blocks_than_one_call_takes_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_blocks = MAX_BLOCKS_PER_CALL + 2
    monkeypatch.setattr(kv_host, "_STORE_BYTES", (num_blocks + 64) * LAYOUT.bytes_per_block)
    hashes = [number.to_bytes(16) for number in range(1, num_blocks + 1)]
    async with harness(tmp_path) as here:
        # 1. The store has the whole prompt.
        region = here.region
        for first in range(0, num_blocks, 1000):
            part = hashes[first : first + 1000]
            slots = [index % NUM_BLOCKS for index in range(len(part))]
            parent = hashes[first - 1].hex() if first else ""
            generations = [region.generation(slot) for slot in slots]
            filled = FilledBlocks("r", parent, [each.hex() for each in part], slots, generations, region_id="pool")
            here.offload.on_filled(ActiveRequest(a_submit(), GatewayStream()), filled)
            num_expected = first + len(part)
            await until(lambda: here.offload.counters["prompt_cache_blocks_published"] == num_expected)  # noqa: B023
        # 2. A reader gets every block but that of the last token.
        submit = a_submit()
        del submit.token_ids[:], submit.block_hashes[:]
        submit.token_ids.extend([1] * num_blocks * BLOCK)
        submit.block_hashes.extend(hashes)
        submit.num_prompt_tokens = num_blocks * BLOCK
        command = await here.added(submit)
        assert [block.index for block in command.prefix] == list(range(num_blocks - 1))
        assert [len(load.block_hashes) for load in here.loads] == [MAX_BLOCKS_PER_CALL, 1]
        assert here.offload.counters["prompt_cache_failures"] == 0


async def test_blocks_that_a_finished_request_filled_are_published_when_their_copies_come_late(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        request = ActiveRequest(a_submit(), GatewayStream())
        here.offload.on_finished(request)  # the pool is the region: nothing comes late
        await here.fill_late(request.key, 0, num_expected=0)
        here.offload.on_ready(msgspec.structs.replace(ready("pool"), max_held_slots=2))
        here.offload.on_finished(request)
        await here.fill_late("another", 0, num_expected=0)
        await here.fill_late(request.key, 0, num_expected=1)
