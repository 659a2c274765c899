"""Does a worker ask its host's store for no more than a request may find, and who pays for what it gives?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import AddRequest, FilledBlocks, OfferPrefix
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_worker import convert
from tandem_worker.engine_regions import EngineRegions
from tandem_worker.kv_link import RegionOffer
from tandem_worker.kv_offload import PromptCache
from tandem_worker.requests import ActiveRequest
from tandem_worker.streams import GatewayStream
from tests.kv_transfer_svc.host import Host, running_host
from tests.tandem_worker.kv_harness import FollowedLink, until
from tests.tandem_worker.scripted_engine import LAYOUT, ScriptedEngine, ready

BLOCK = LAYOUT.tokens_per_block
NUM_BLOCKS = 8
HASHES = [bytes([index]) * 16 for index in range(NUM_BLOCKS)]


class World:
    """A worker's cache between a scripted engine and a real KV service, whose calls are written down."""

    def __init__(self, host: Host) -> None:
        self.loads: list[kv.LoadRequest] = []
        self.publishes: list[kv.PublishRequest] = []
        self.engine = ScriptedEngine()
        self.link = FollowedLink(host)
        self.cache = PromptCache(self.engine, self.link, EngineRegions(self.engine, self.link), "life")
        self.region = SharedRegion.create("test-pool", NUM_BLOCKS * LAYOUT.bytes_per_block, NUM_BLOCKS)
        self.num_unloads = 0
        load, publish, unload = host.host_cache.load, host.host_cache.publish, host.host_cache.unload

        def noted_unload(reader_id: str) -> None:
            self.num_unloads += 1
            unload(reader_id)

        async def noted_load(request: kv.LoadRequest) -> kv.LoadReply:
            self.loads.append(request)
            return await load(request)

        async def noted_publish(request: kv.PublishRequest) -> kv.PublishReply:
            self.publishes.append(request)
            return await publish(request)

        host.host_cache.load = noted_load  # type: ignore[method-assign]
        host.host_cache.publish = noted_publish  # type: ignore[method-assign]
        host.host_cache.unload = noted_unload  # type: ignore[method-assign]

    async def lend(self) -> None:
        region = self.region
        offer = RegionOffer(
            "pool", region.total_bytes, NUM_BLOCKS, LAYOUT.bytes_per_block, region.generations_offset, os.dup(region.fd)
        )
        self.link.lend(offer)
        await asyncio.wait_for(self.link.wait_lent(), 10)
        self.cache.ready(ready("pool"))

    async def added(self, submit: pb.Submit) -> AddRequest:
        """Let a request in; return it as the engine hears of it."""
        num_before = len(self.engine.sent_of(AddRequest))
        request = ActiveRequest(submit, GatewayStream())
        self.cache.add(request, convert.add_request(submit, request.key, "aggregated"))
        await until(lambda: len(self.engine.sent_of(AddRequest)) > num_before)
        self.cache.admitted([request.key])
        command: AddRequest = self.engine.sent_of(AddRequest)[-1]
        return command

    async def fill(self, submit: pb.Submit, first: int, num_blocks: int) -> None:
        """Say that the engine has filled blocks, and wait until the store has them."""
        num_expected = self.cache.counters["prompt_cache_blocks_published"] + num_blocks
        slots = list(range(first, first + num_blocks))
        hashes = [block_hash.hex() for block_hash in HASHES[first : first + num_blocks]]
        parent = HASHES[first - 1].hex() if first else ""
        generations = [self.region.generation(slot) for slot in slots]
        filled = FilledBlocks(submit.request_id, parent, hashes, slots, generations)
        self.cache.filled(ActiveRequest(submit, GatewayStream()), filled)
        await until(lambda: self.cache.counters["prompt_cache_blocks_published"] == num_expected)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with running_host(folder) as host:
        here = World(host)
        try:
            await here.lend()
            yield here
        finally:
            await here.cache.close()
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


async def test_the_store_is_asked_for_what_may_be_found_and_never_for_the_last_token(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
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


async def test_a_request_that_must_not_find_does_not_ask(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.fill(a_submit(), 0, NUM_BLOCKS)
        for submit in (a_submit(max_found_blocks=0), a_submit(BLOCK)):
            assert (await here.added(submit)).prefix == []
        assert here.loads == [] and here.cache.counters["prompt_cache_asked"] == 0


async def test_public_blocks_count_towards_no_account(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        submit = a_submit(num_public_blocks=3)
        # 1. A run across the border is offered in two calls, one behind the other.
        await here.fill(submit, 0, 5)
        assert tags(here.publishes) == [(b"public", b"", HASHES[:3]), (b"account!", HASHES[2], HASHES[3:5])]
        # 2. What comes later is the account's.
        await here.fill(submit, 5, 2)
        assert tags(here.publishes)[2:] == [(b"account!", HASHES[4], HASHES[5:7])]
        # 3. All of them are one chain to whoever loads it.
        assert len((await here.added(submit)).prefix) == 7


async def test_a_preempted_request_is_told_where_the_store_has_its_blocks(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.fill(a_submit(), 0, 2)
        request = ActiveRequest(a_submit(), GatewayStream())
        here.cache.preempted(request, [block_hash.hex() for block_hash in HASHES[:3]])
        await until(lambda: bool(here.engine.sent_of(OfferPrefix)))
        (offer,) = here.engine.sent_of(OfferPrefix)
        assert offer.request_id == request.key and [block.index for block in offer.prefix] == [0, 1]


async def test_what_the_store_has_not_is_not_offered(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        request = ActiveRequest(a_submit(), GatewayStream())
        here.cache.preempted(request, [HASHES[0].hex()])
        await until(lambda: here.num_unloads == 1)
        assert here.engine.sent_of(OfferPrefix) == []


async def test_a_store_that_has_nothing_of_a_prompt_is_not_asked_and_one_that_has_is(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert (await here.added(a_submit())).prefix == [] and here.loads == []
        await here.fill(a_submit(), 0, 2)
        assert [block.index for block in (await here.added(a_submit())).prefix] == [0, 1]
        await here.added(a_submit(prefix_source="127.0.0.1:1"))
        assert len(here.loads) == 2
