"""The whole system gives the same tokens as transformers, by every route."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, tokens_of
from tests.system.reference import greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ["demo", "llama", "mistral", "mixtral"]
ROUTES = {
    "disaggregated": ("decode-shm", "prefill-0"),
    "over gRPC": ("decode-grpc", "prefill-0"),
    "aggregated": ("decode-shm", None),
}
NUM_TOKENS = 24


@dataclass(frozen=True)
class World:
    fleet: Fleet
    folder: Path
    model_id: str
    vocab_size: int

    def prompt(self, length: int) -> list[int]:
        return random.Random(length).choices(range(3, min(self.vocab_size, 300)), k=length)

    async def run(self, request: TokenRequest, route: str = "disaggregated") -> RequestStream:
        """Run a request to its end along a route."""
        decode, prefill = ROUTES[route]
        stream = await self.fleet.dispatcher(decode, prefill).submit(request)
        async for _ in stream:
            pass
        return stream


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def world(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = checkpoint(request.param)
    async with Fleet(tmp_path_factory.mktemp(f"parity-{request.param}")) as fleet:
        model = ("--model", str(folder), *SMALL, "--max-num-batched-tokens", "64")
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *model)
        fleet.start("decode", "decode-shm", *model)
        fleet.start("decode", "decode-grpc", *model, "--kv-transport", "grpc")
        await fleet.ready()
        worker = fleet.registry.get("decode-shm")
        assert worker is not None
        yield World(fleet, folder, worker.info.card.model_id, worker.info.card.vocab_size)


@pytest.mark.parametrize("route", ROUTES)
async def test_greedy_tokens_are_those_of_transformers(world: World, route: str) -> None:
    for length in (1, 16, 33, 150):  # one token, one full block, a tail, and beyond every window and chunk
        prompt = world.prompt(length)
        request = token_request(world.model_id, prompt, NUM_TOKENS, account=route)
        stream = await world.run(request, route)
        assert stream.state.choices[0].tokens == greedy(world.folder, prompt, NUM_TOKENS), f"{length} tokens, {route}"
    await world.fleet.pools_are_full()


@pytest.mark.parametrize("route", ["disaggregated", "over gRPC"])
async def test_decode_computes_only_what_follows_token_one(world: World, route: str) -> None:
    """Decision 24: the cache really moved, and all of it, and nothing was computed twice."""
    num_prompt = 100
    request = token_request(world.model_id, world.prompt(num_prompt), NUM_TOKENS, account=f"fresh, {route}")
    stream = await world.run(request, route)
    ledger, pool = stream.state.choices[0].ledger, (await world.fleet.stats("decode-shm")).kv
    assert ledger is not None and stream.state.prefill_ledger is not None
    num_blocks = -(-num_prompt // pool.tokens_per_block)
    assert ledger.num_generated_tokens == NUM_TOKENS - 1
    assert ledger.num_computed_tokens == ledger.num_reprefill_tokens == 0
    assert ledger.num_bytes_pulled == num_blocks * pool.bytes_per_block
    assert ledger.transport == ("grpc" if route == "over gRPC" else "shm")
    assert stream.state.prefill_ledger.num_computed_tokens == num_prompt
    assert (await world.fleet.stats(ROUTES[route][0])).counters["reprefill_tokens"] == 0


@pytest.mark.parametrize("route", ROUTES)
async def test_tokens_that_were_guessed_ahead_are_those_of_transformers(world: World, route: str) -> None:
    """Of the second of two equal requests most tokens are guessed from the first one's answer."""
    prompt = world.prompt(37)
    for _ in range(2):
        request = token_request(world.model_id, prompt, NUM_TOKENS, account=f"twice, {route}")
        stream = await world.run(request, route)
        assert stream.state.choices[0].tokens == greedy(world.folder, prompt, NUM_TOKENS)
    ledger = stream.state.choices[0].ledger
    assert ledger is not None
    assert 0 < ledger.num_accepted_tokens <= ledger.num_draft_tokens
    await world.fleet.pools_are_full()


async def test_a_seed_gives_the_same_tokens_by_every_route_and_beside_any_neighbours(world: World) -> None:
    prompt = world.prompt(40)

    def sampled(account: str) -> TokenRequest:
        return token_request(
            world.model_id,
            prompt,
            NUM_TOKENS,
            account=account,
            seed=12345,
            temperature=0.9,
            top_p=0.95,
            top_k=50,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.1,
        )

    alone = [(await world.run(sampled(route), route)).state.choices[0].tokens for route in ROUTES]
    co_runners = [
        world.run(token_request(world.model_id, world.prompt(20 + i), 30, seed=i, temperature=1.0)) for i in range(6)
    ]
    crowded, *_ = await asyncio.gather(world.run(sampled("crowded")), *co_runners)
    assert alone[0] == alone[1] == alone[2] == crowded.state.choices[0].tokens
    assert len(alone[0]) == NUM_TOKENS


async def test_a_prompt_seen_before_is_not_computed_or_moved_again(world: World) -> None:
    prompt, block_size = world.prompt(80), 16
    first = await world.run(token_request(world.model_id, prompt, 4, account="cache"))
    again = await world.run(token_request(world.model_id, prompt, 4, account="cache"))
    other = await world.run(token_request(world.model_id, prompt, 4, account="somebody else"))
    assert first.usage.num_cached_tokens == other.usage.num_cached_tokens == 0
    assert again.usage.num_cached_tokens == 4 * block_size  # at least one token is always computed
    assert again.state.choices[0].ledger is not None and again.state.choices[0].ledger.num_bytes_pulled == 0
    assert first.state.choices[0].tokens == again.state.choices[0].tokens == other.state.choices[0].tokens


async def test_choices_share_one_prompt_and_differ_by_seed(world: World) -> None:
    seeds = (7, 8, 9)
    request = token_request(world.model_id, world.prompt(50), 12, temperature=1.5, choice_seeds=seeds)
    together = await tokens_of(world.fleet.dispatcher("decode-shm", "prefill-0"), request)
    for seed, tokens in zip(seeds, together, strict=True):
        alone = token_request(world.model_id, world.prompt(50), 12, temperature=1.5, seed=seed)
        assert tokens == (await world.run(alone)).state.choices[0].tokens
    assert len({tuple(tokens) for tokens in together}) == len(seeds)
    await world.fleet.pools_are_full()


async def test_token_one_does_not_wait_for_the_hand_over(world: World) -> None:
    """The KV service sleeps: token one comes from prefill all the same, and the rest when the service wakes."""
    prompt = world.prompt(60)
    expected = greedy(world.folder, prompt, 8)
    service = world.fleet.services["kv-0"]
    service.kill(signal.SIGSTOP)
    try:
        request = token_request(world.model_id, prompt, 8, account="asleep")
        stream = await world.fleet.dispatcher("decode-shm", "prefill-0").submit(request)
        deltas = aiter(stream)
        first = await anext(deltas)
        assert list(first.token_ids) == expected[:1]
        assert stream.state.choices[0].tokens == expected[:1]
    finally:
        service.kill(signal.SIGCONT)
    async for _ in deltas:
        pass
    assert stream.state.choices[0].tokens == expected
    ledger = stream.state.choices[0].ledger
    assert ledger is not None and ledger.num_computed_tokens == 0
