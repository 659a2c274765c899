"""Workers whose pools others cannot read hand over through a small region: exact tokens, bounded memory, no leaks."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.checkpoints import make_long_checkpoint
from tests.system.fleet import Fleet, token_request, tokens_of
from tests.system.reference import greedy

_BLOCK = 4
_NUM_TOKENS = 600
_NUM_ANSWER_TOKENS = 6
_BYTES_PER_BLOCK = 768 * _BLOCK
_STAGING_BYTES = 20 * _BYTES_PER_BLOCK
"""A prompt has 150 blocks."""


async def test_prompts_larger_than_the_region_pass_through_it_whoever_reads_and_whoever_dies(tmp_path: Path) -> None:
    folder = make_long_checkpoint(tmp_path, _NUM_TOKENS + 100)
    chance = random.Random(3)
    prompts = [chance.choices(range(3, 300), k=_NUM_TOKENS) for _ in range(4)]
    expected = [greedy(folder, prompt, _NUM_ANSWER_TOKENS) for prompt in prompts]
    async with Fleet(tmp_path, hash_grain=_BLOCK) as fleet:
        model = ("--model", str(folder), "--num-threads", "1", "--dtype", "float32", "--block-size", str(_BLOCK))
        flags = (*model, "--num-kv-blocks", "1200", "--max-num-batched-tokens", "128")
        staged = (*flags, "--kv-staging", "always", "--kv-staging-bytes", str(_STAGING_BYTES))
        fleet.start("kv", "kv-a", "--store-bytes", "0")
        fleet.start("kv", "kv-b", "--host-id", "host-b", "--arena-bytes", str(1 << 20), "--store-bytes", "0")
        fleet.start("prefill", "prefill-a", *staged)
        fleet.start("decode", "decode-a", *staged)
        fleet.start("decode", "decode-b", *flags, "--host-id", "host-b")
        await fleet.ready()
        await fleet.handed_over("long-llama", "prefill-a", "decode-a")
        await fleet.handed_over("long-llama", "prefill-a", "decode-b")

        # 1. At the same time, to decode workers of both hosts; one of them with two choices.
        decodes = ("decode-a", "decode-b", "decode-a")
        asks = [_answer(fleet, prompt, decode) for prompt, decode in zip(prompts[:3], decodes, strict=True)]
        two = tokens_of(
            fleet.dispatcher("decode-b", "prefill-a"),
            token_request("long-llama", prompts[3], _NUM_ANSWER_TOKENS, choice_seeds=(1, 2)),
        )
        *answers, choices = await asyncio.gather(*asks, two)
        assert answers == expected[:3]
        assert choices == [expected[3], expected[3]]
        # 2. The same prompts again: prefill has them in its pool, and copies them out again.
        assert await _answer(fleet, prompts[0], "decode-b") == expected[0]
        await fleet.pools_are_full()
        stats = await fleet.stats("prefill-a")
        assert stats.counters["staging_slots"] == 20 < stats.kv.num_total_blocks
        assert stats.counters["blocks_staged"] >= 4 * _NUM_TOKENS // _BLOCK
        assert stats.counters["kv_seal_failures"] == 0
        # 3. The readers' KV service stops while two prompts fill the region, and dies: the next prompt finds it free.
        fleet.services["kv-b"].kill(signal.SIGSTOP)
        stuck = [
            await fleet.dispatcher("decode-b", "prefill-a").submit(_request(prompts[index][::-1])) for index in (0, 3)
        ]
        await _until_the_region_is_full(fleet)
        fleet.services["kv-b"].kill()
        for stream, index in zip(stuck, (0, 3), strict=True):
            assert await _tokens(stream) == greedy(folder, prompts[index][::-1], _NUM_ANSWER_TOKENS)
        new = prompts[2][300:] + prompts[2][:300]
        assert await _answer(fleet, new, "decode-a") == greedy(folder, new, _NUM_ANSWER_TOKENS)
        # 4. kill -9 of prefill while the prompt passes: decode computes the rest, and nothing is left anywhere.
        stream = await fleet.dispatcher("decode-a", "prefill-a").submit(_request(prompts[1][::-1]))
        await _until_some_are_imported(fleet, "decode-a")
        fleet.services["prefill-a"].kill()
        assert await _tokens(stream) == greedy(folder, prompts[1][::-1], _NUM_ANSWER_TOKENS)
        await fleet.pools_are_full()


def _request(prompt: list[int]) -> TokenRequest:
    return token_request("long-llama", prompt, _NUM_ANSWER_TOKENS)


async def _answer(fleet: Fleet, prompt: list[int], decode: str) -> list[int]:
    """Return the tokens of an answer; prefill has computed the prompt, decode nothing of it."""
    stream: RequestStream = await fleet.dispatcher(decode, "prefill-a").submit(_request(prompt))
    tokens = await _tokens(stream)
    [choice] = stream.state.choices
    assert choice.ledger is not None and choice.ledger.num_computed_tokens == 0
    assert choice.ledger.num_bytes_pulled > 0.9 * _NUM_TOKENS // _BLOCK * _BYTES_PER_BLOCK
    return tokens


async def _tokens(stream: RequestStream) -> list[int]:
    async for _ in stream:
        pass
    [choice] = stream.state.choices
    return list(choice.tokens)


async def _until_the_region_is_full(fleet: Fleet) -> None:
    async with asyncio.timeout(30):
        while (await fleet.stats("prefill-a")).counters["staging_slots_held"] < _STAGING_BYTES // _BYTES_PER_BLOCK:
            pass


async def _until_some_are_imported(fleet: Fleet, decode: str) -> None:
    before = (await fleet.stats(decode)).counters["blocks_imported"]
    async with asyncio.timeout(30):
        while (await fleet.stats(decode)).counters["blocks_imported"] == before:
            pass
