"""A prompt of more blocks than any call takes is handed over whichever way its KV comes."""

from __future__ import annotations

import random
from pathlib import Path

from control_plane.dispatch.request_stream import RequestStream
from tests.checkpoints import make_long_checkpoint
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import greedy

_BLOCK = 2
_NUM_TOKENS = 8320
_NUM_BLOCKS = _NUM_TOKENS // _BLOCK
"""More than the 4,096 that one call takes; each has a page of 4 KiB in an arena or a store."""
_NUM_ANSWER_TOKENS = 8
_ARENA_BYTES = 1 << 20
"""The least that a KV service takes: a sixteenth of the prompt's KV."""
_STORE_BYTES = 40 << 20
"""Two prompts, and the part that is kept free for writes to disk."""
_POOL = ("--num-kv-blocks", str(_NUM_BLOCKS + 200))
"""One prompt: the next one takes its place, but for the first blocks."""
_MOST = 0.9


async def test_decode_computes_nothing_of_a_prompt_of_more_blocks_than_a_call_takes(tmp_path: Path) -> None:
    folder = make_long_checkpoint(tmp_path, _NUM_TOKENS + 100)
    chance = random.Random(7)
    prompt, *others = (chance.choices(range(3, 300), k=_NUM_TOKENS) for _ in range(4))
    expected = greedy(folder, prompt, _NUM_ANSWER_TOKENS)
    async with Fleet(tmp_path, hash_grain=_BLOCK) as fleet:
        flags = ("--model", str(folder), "--num-threads", "1", "--dtype", "float32", "--block-size", str(_BLOCK))
        store = ("--store-bytes", str(_STORE_BYTES), "--disk-bytes", str(1 << 30), "--disk-dir", str(tmp_path / "disk"))
        fleet.start("kv", "kv-a", *store)
        fleet.start("kv", "kv-b", "--host-id", "host-b", "--arena-bytes", str(_ARENA_BYTES), "--store-bytes", "0")
        fleet.start("prefill", "prefill-a", *flags, *_POOL)
        fleet.start("decode", "decode-a", *flags, *_POOL)
        fleet.start("decode", "decode-b", *flags, *_POOL, "--host-id", "host-b")
        await fleet.ready()
        await fleet.handed_over("long-llama", "prefill-a", "decode-a")
        await fleet.handed_over("long-llama", "prefill-a", "decode-b")

        # 1. Cold: prefill computes all of it.
        assert await _sources(fleet, prompt, expected, "decode-a") == (_NUM_TOKENS, 0, 0)
        await _stored(fleet, _NUM_BLOCKS - 1)
        # 2. In prefill's pool, and through the small arena of another host.
        computed, cached, loaded = await _sources(fleet, prompt, expected, "decode-b")
        assert (computed <= _BLOCK, computed + cached, loaded) == (True, _NUM_TOKENS, 0)
        # 3. Another prompt takes its place in both pools, except a few blocks: the store in memory has it.
        await until(lambda: _is_loaded(fleet, prompt, expected, others[:1]), 120)
        # 4. Three take its place in memory too: the disk has it.
        before = (await fleet.stats("kv-a")).counters["disk_hits"]
        await until(lambda: _is_loaded(fleet, prompt, expected, others), 120)
        assert (await fleet.stats("kv-a")).counters["disk_hits"] - before > _MOST * _NUM_BLOCKS
        await fleet.pools_are_full()


async def _sources(fleet: Fleet, prompt: list[int], expected: list[int] | None, decode: str) -> tuple[int, int, int]:
    """Return how many tokens of a prompt prefill has computed, found and (of these) loaded; decode computes none."""
    dispatcher = fleet.dispatcher(decode, "prefill-a")
    stream: RequestStream = await dispatcher.submit(token_request("long-llama", prompt, _NUM_ANSWER_TOKENS))
    async for _ in stream:
        pass
    [choice], ledger = stream.state.choices, stream.state.prefill_ledger
    assert ledger is not None and choice.ledger is not None
    assert choice.ledger.num_computed_tokens == 0
    assert choice.ledger.num_bytes_pulled > _MOST * _NUM_BLOCKS * (await fleet.stats(decode)).kv.bytes_per_block
    assert expected is None or choice.tokens == expected
    return ledger.num_computed_tokens, ledger.num_cached_tokens, ledger.num_loaded_tokens


async def _stored(fleet: Fleet, num_blocks: int) -> None:
    async def are_there() -> bool:
        return (await fleet.stats("kv-a")).kv_service.store.num_blocks >= num_blocks

    await until(are_there, 20)


async def _is_loaded(fleet: Fleet, prompt: list[int], expected: list[int], others: list[list[int]]) -> bool:
    """Ask after other prompts; return whether prefill has loaded it. On a slow machine a lookup may be given up."""
    for other in others:
        await _sources(fleet, other, None, "decode-a")
    computed, _, loaded = await _sources(fleet, prompt, expected, "decode-a")
    return computed == _BLOCK and loaded > _MOST * _NUM_TOKENS
