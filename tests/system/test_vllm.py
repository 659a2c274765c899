"""Workers with vLLM hand over as our own engine does, where TANDEM_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.checkpoints import make_wide_checkpoint
from tests.system.bit_flips import engine_pid
from tests.system.fleet import Fleet, token_request, tokens_of, until

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
MODEL = "@tandem/demo"
ENGINE = ("--engine", "vllm", "--vllm-python", PYTHON, "--num-threads", "1")
FLAGS = (*ENGINE, "--max-model-len", "1000", "--num-kv-blocks", "160")
BLOCK = 32
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "seed": 5, "frequency_penalty": 0.6, "min_tokens": 9}

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("vllm")) as fleet:
        fleet.start("kv", "kv-a")
        fleet.start("prefill", "prefill-a", *FLAGS)
        fleet.start("decode", "decode-a", *FLAGS)
        await fleet.ready()
        await fleet.handed_over(MODEL, "prefill-a", "decode-a")
        yield fleet


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + num_tokens).choices(range(20, 250), k=num_tokens)


async def run(fleet: Fleet, request: TokenRequest, prefill: str | None = "prefill-a") -> RequestStream:
    stream = await fleet.dispatcher("decode-a", prefill).submit(request)
    async for _ in stream:
        pass
    return stream


def tokens(stream: RequestStream) -> list[int]:
    [choice] = stream.state.choices
    return list(choice.tokens)


def ledger(stream: RequestStream) -> Any:
    [choice] = stream.state.choices
    assert choice.ledger is not None, "decode has reported"
    return choice.ledger


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_handed_over_tokens_are_those_of_one_engine_and_decode_computes_no_prompt(
    fleet: Fleet, sampling: dict[str, Any]
) -> None:
    bytes_per_block = (await fleet.stats("decode-a")).kv.bytes_per_block
    for num_tokens in (1, 31, 32, 33, 63, 64, 70, 700):
        request = token_request(MODEL, prompt_of(num_tokens), 12, cacheable=False, **sampling)
        alone = await run(fleet, request, None)
        request = token_request(MODEL, prompt_of(num_tokens), 12, cacheable=False, **sampling)
        handed = await run(fleet, request)
        assert tokens(handed) == tokens(alone), f"{num_tokens} tokens"
        assert (ledger(handed).num_computed_tokens, ledger(handed).num_reprefill_tokens) == (0, 0)
        assert ledger(handed).num_bytes_pulled == -(-num_tokens // BLOCK) * bytes_per_block
    await fleet.pools_are_full()


async def test_choices_share_one_prompt_and_differ_by_seed(fleet: Fleet) -> None:
    seeds = (7, 8, 9)
    request = token_request(MODEL, prompt_of(50), 12, temperature=1.5, choice_seeds=seeds, cacheable=False)
    together = await tokens_of(fleet.dispatcher("decode-a", "prefill-a"), request)
    for seed, choice in zip(seeds, together, strict=True):
        request = token_request(MODEL, prompt_of(50), 12, temperature=1.5, seed=seed, cacheable=False)
        assert choice == tokens(await run(fleet, request, None))
    assert len({tuple(choice) for choice in together}) == len(seeds)
    await fleet.pools_are_full()


async def test_a_prompt_seen_before_is_not_computed_or_moved_again(fleet: Fleet) -> None:
    prompt = prompt_of(100)
    first, again = [await run(fleet, token_request(MODEL, prompt, 4, account="one")) for _ in range(2)]
    other = await run(fleet, token_request(MODEL, prompt, 4, account="two"))
    assert first.usage.num_cached_tokens == other.usage.num_cached_tokens == 0
    assert again.usage.num_cached_tokens == 3 * BLOCK
    bytes_per_block = (await fleet.stats("decode-a")).kv.bytes_per_block
    assert ledger(first).num_bytes_pulled == 4 * bytes_per_block
    assert ledger(again).num_bytes_pulled == 1 * bytes_per_block, "decode has the whole blocks, not the last one"
    assert tokens(first) == tokens(again) == tokens(other)
    assert ledger(again).num_computed_tokens == ledger(other).num_computed_tokens == 0
    await fleet.pools_are_full()


async def test_token_one_does_not_wait_for_the_hand_over(fleet: Fleet) -> None:
    """The KV service sleeps: token one comes from prefill all the same, and the rest when the service wakes."""
    expected = tokens(await run(fleet, token_request(MODEL, prompt_of(80), 8, cacheable=False), None))
    service = fleet.services["kv-a"]
    service.kill(signal.SIGSTOP)
    try:
        request = token_request(MODEL, prompt_of(80), 8, cacheable=False)
        stream = await fleet.dispatcher("decode-a", "prefill-a").submit(request)
        deltas = aiter(stream)
        first = await anext(deltas)
        assert list(first.token_ids) == tokens(stream) == expected[:1]
    finally:
        service.kill(signal.SIGCONT)
    async for _ in deltas:
        pass
    assert tokens(stream) == expected and ledger(stream).num_computed_tokens == 0
    await fleet.pools_are_full()


async def test_more_prompts_than_the_pools_hold_are_all_answered(fleet: Fleet) -> None:
    """Each pool has 80 blocks of 32; the prompts need 15 and 16 each, 24 at the same time."""
    prompts = [prompt_of(470 + index, seed=index) for index in range(24)]
    expected = [tokens(await run(fleet, _plain(prompt), None)) for prompt in prompts[:6]]
    answers = await asyncio.gather(*(run(fleet, _plain(prompt)) for prompt in prompts))
    assert [tokens(answer) for answer in answers[:6]] == expected
    assert all(len(tokens(answer)) == 20 for answer in answers)
    await fleet.pools_are_full()


async def test_clients_that_leave_in_any_state_leave_nothing(fleet: Fleet) -> None:
    async def leave_after(num_deltas: int, index: int) -> None:
        stream = await fleet.dispatcher("decode-a", "prefill-a").submit(_plain(prompt_of(600, seed=index), 300))
        deltas = aiter(stream)
        for _ in range(num_deltas):
            await anext(deltas)
        await stream.aclose()

    await asyncio.gather(*(leave_after(index % 4, index) for index in range(12)))
    await fleet.pools_are_full()
    assert (await fleet.stats("decode-a")).num_running == (await fleet.stats("prefill-a")).num_running == 0


async def test_kill_9_of_the_engines_costs_no_token_and_the_store_has_the_prompt(fleet: Fleet) -> None:
    prompt = prompt_of(200, seed=9)
    expected = tokens(await run(fleet, token_request(MODEL, prompt, 40, account="store")))
    num_full_blocks = (200 + 40 - 1) // BLOCK
    await until(lambda: _is_stored(fleet, num_full_blocks), 20)
    # 1. Prefill's engine dies while a prompt passes: decode computes what is missing.
    before = (await fleet.stats("prefill-a")).counters["prompt_tokens_computed"]
    stream = await fleet.dispatcher("decode-a", "prefill-a").submit(_plain(prompt_of(900, seed=3)))
    await until(lambda: _has_computed(fleet, "prefill-a", before), 30)
    os.kill(engine_pid(fleet.services["prefill-a"].process.pid), signal.SIGKILL)
    async for _ in stream:
        pass
    assert tokens(stream) == tokens(await run(fleet, _plain(prompt_of(900, seed=3)), None))
    # 2. Decode's dies too, and others take their places.
    os.kill(engine_pid(fleet.services["decode-a"].process.pid), signal.SIGKILL)
    for name in ("prefill-a", "decode-a"):
        await fleet.ended(fleet.services.pop(name))
    await until(lambda: not any(fleet.worker(name) for name in ("prefill-a", "decode-a")), 30)
    for role in ("prefill", "decode"):
        fleet.start(role, f"{role}-a", *FLAGS)
    await fleet.ready()
    await fleet.handed_over(MODEL, "prefill-a", "decode-a")
    # 3. The prompt's full blocks come from the host's store.
    again = await run(fleet, token_request(MODEL, prompt, 40, account="store"))
    of_prefill = again.state.prefill_ledger
    assert of_prefill is not None and tokens(again) == expected
    assert (of_prefill.num_loaded_tokens, of_prefill.num_computed_tokens) == (6 * BLOCK, 200 - 6 * BLOCK)
    await fleet.pools_are_full()


def _plain(prompt: Sequence[int], max_tokens: int = 20) -> TokenRequest:
    return token_request(MODEL, prompt, max_tokens, cacheable=False)


async def _is_stored(fleet: Fleet, num_blocks: int) -> bool:
    return (await fleet.stats("kv-a")).kv_service.store.num_blocks >= num_blocks


async def _has_computed(fleet: Fleet, name: str, before: float) -> bool:
    return (await fleet.stats(name)).counters["prompt_tokens_computed"] > before


async def test_pools_and_a_region_that_are_too_small_only_cost_time(fleet: Fleet, tmp_path: Path) -> None:
    """32 blocks in each pool and 6 slots in the region, for prompts and answers of 13 blocks each."""
    bytes_per_block = (await fleet.stats("decode-a")).kv.bytes_per_block
    prompts = [prompt_of(200 + 11 * index, seed=index) for index in range(10)]
    expected = [tokens(await run(fleet, _plain(prompt, 200), None)) for prompt in prompts]
    small = (*FLAGS, "--num-kv-blocks", "64", "--kv-staging-bytes", str(6 * bytes_per_block))
    async with Fleet(tmp_path) as tight:
        tight.start("kv", "kv-a")
        tight.start("prefill", "prefill-a", *small)
        tight.start("decode", "decode-a", *small)
        await tight.ready()
        await tight.handed_over(MODEL, "prefill-a", "decode-a")
        routes = ("prefill-a", None) * 5
        asks = [run(tight, _plain(prompt, 200), route) for prompt, route in zip(prompts, routes, strict=True)]
        assert [tokens(answer) for answer in await asyncio.gather(*asks)] == expected
        stats = await tight.stats("decode-a")
        assert stats.counters["preemptions"] > 0, "or the pool was not too small"
        assert (await tight.stats("prefill-a")).counters["staging_slots"] == 6
        await tight.pools_are_full()


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
async def test_models_with_windows_hand_over_and_find_their_prompts(kind: str, tmp_path: Path) -> None:
    """A window of 48 tokens in all layers, or in five of six."""
    folder = make_wide_checkpoint(tmp_path, kind)
    model = folder.name
    flags = (*ENGINE, "--model", str(folder), "--num-kv-blocks", "160")
    async with Fleet(tmp_path) as fleet:
        fleet.start("kv", "kv-a")
        fleet.start("prefill", "prefill-a", *flags)
        fleet.start("decode", "decode-a", *flags)
        await fleet.ready()
        await fleet.handed_over(model, "prefill-a", "decode-a")
        for num_tokens in (40, 64, 70, 300):
            prompt = prompt_of(num_tokens)
            alone = tokens(await run(fleet, token_request(model, prompt, 40, cacheable=False), None))
            for _ in range(3):  # decode, and in the second model prefill, find blocks from the second time on
                handed = await run(fleet, token_request(model, prompt, 40))
                assert tokens(handed) == alone and ledger(handed).num_computed_tokens == 0, f"{num_tokens} tokens"
            again = await run(fleet, token_request(model, prompt, 40), None)
            assert tokens(again) == alone and again.usage.num_cached_tokens == (num_tokens - 1) // BLOCK * BLOCK
        await fleet.pools_are_full()
