"""The cache crosses hosts, and nothing is left on either host."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.checkpoints import make_deep_checkpoint
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request
from tests.system.reference import greedy

_ARENA_BYTES = 1 << 20
"""The least that a KV service takes."""


async def test_decode_on_another_host_pulls_over_tcp_and_goes_on_at_token_two(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompt = checkpoint("llama"), random.Random(5).choices(range(3, 300), k=130)
    async with Fleet(tmp_path) as fleet:
        model = ("--model", str(folder), *SMALL, "--max-num-batched-tokens", "64")
        fleet.start("kv", "kv-a", "--host-id", "host-a")
        fleet.start("kv", "kv-b", "--host-id", "host-b")
        fleet.start("prefill", "prefill-a", "--host-id", "host-a", *model)
        fleet.start("decode", "decode-b", "--host-id", "host-b", *model)
        await fleet.ready()
        await fleet.proven()
        before = {name: (await fleet.stats(name)).counters for name in ("kv-a", "kv-b")}
        dispatcher = fleet.dispatcher("decode-b", "prefill-a")
        stream = await dispatcher.submit(token_request("tiny-llama", prompt, 16, choice_seeds=(0, 0)))
        async for _ in stream:
            pass

        expected = greedy(folder, prompt, 16)
        assert [choice.tokens for choice in stream.state.choices] == [expected, expected]
        pool = (await fleet.stats("decode-b")).kv
        num_bytes = -(-len(prompt) // pool.tokens_per_block) * pool.bytes_per_block
        for choice in stream.state.choices:
            assert choice.ledger is not None
            assert (choice.ledger.transport, choice.ledger.num_bytes_pulled) == ("tcp", num_bytes)
            assert choice.ledger.num_computed_tokens == 0
        after = {name: (await fleet.stats(name)).counters for name in before}
        pulled = after["kv-b"]["bytes_pulled"] - before["kv-b"]["bytes_pulled"]
        served = after["kv-a"]["bytes_served"] - before["kv-a"]["bytes_served"]
        assert pulled == served == num_bytes  # once, for both choices
        await fleet.pools_are_full()


async def test_a_prompt_longer_than_the_arena_is_handed_over_and_nothing_of_it_is_computed(tmp_path: Path) -> None:
    folder, prompt = make_deep_checkpoint(tmp_path, 12), random.Random(6).choices(range(3, 300), k=470)
    async with Fleet(tmp_path) as fleet:
        model = ("--model", str(folder), *SMALL, "--max-num-batched-tokens", "512")
        fleet.start("kv", "kv-a", "--host-id", "host-a")
        fleet.start("kv", "kv-b", "--host-id", "host-b", "--arena-bytes", str(_ARENA_BYTES))
        fleet.start("prefill", "prefill-a", "--host-id", "host-a", *model)
        fleet.start("decode", "decode-b", "--host-id", "host-b", *model)
        await fleet.ready()
        await fleet.proven()
        pool = (await fleet.stats("decode-b")).kv
        num_bytes = -(-len(prompt) // pool.tokens_per_block) * pool.bytes_per_block
        assert num_bytes > _ARENA_BYTES
        dispatcher = fleet.dispatcher("decode-b", "prefill-a")
        stream = await dispatcher.submit(token_request("deep-llama", prompt, 8, choice_seeds=(0, 0)))
        async for _ in stream:
            pass
        expected = greedy(folder, prompt, 8)
        for choice in stream.state.choices:
            assert choice.tokens == expected
            assert choice.ledger is not None
            assert (choice.ledger.num_bytes_pulled, choice.ledger.num_computed_tokens) == (num_bytes, 0)
        assert (await fleet.stats("decode-b")).counters["kv_pull_failures"] == 0
        await fleet.pools_are_full()
