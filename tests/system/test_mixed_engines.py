"""Our engine and vLLM serve one model name: which of their workers share blocks, and what answers are worth.

The tests need TANDEM_VLLM_PYTHON, an interpreter with vLLM.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem_runtime.kv.spaces import model_identity, space_of
from tests.system.fleet import Fleet, token_request, tokens_of
from tests.system.mixed_hardware import NUM_TOKENS, answered, card
from tests.system.reference import clear_prompt, greedy
from tests.system.streams import MODEL

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
LONG = 200
"""Answer tokens: enough that a worker dies in the middle, not behind the end."""
SMALL = ("--num-threads", "1", "--num-kv-blocks", "128", "--max-model-len", "1024", "--dtype", "float32")
START_SECONDS = 240.0
"""Of two processes with vLLM at once, on a machine with other work."""
OURS = (*SMALL, "--block-size", "16")
VLLM = (*SMALL, "--engine", "vllm", "--vllm-python", PYTHON)

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(600),
]


@asynccontextmanager
async def fleet_of(folder: Path, exactness: str, *workers: tuple[str, str, tuple[str, ...]]) -> AsyncIterator[Fleet]:
    """Run a KV service and workers, each a role, a name and flags."""
    async with Fleet(folder, hash_grain=16) as fleet:
        fleet.start("kv", "kv-0")
        for role, name, flags in workers:
            fleet.start(role, name, *flags, "--exactness", exactness)
        await fleet.ready(seconds=START_SECONDS)
        yield fleet


async def lost(fleet: Fleet, folder: Path, victim: str, heir: str) -> None:
    """Kill the worker of an answer: the other engine goes on with it, and the answer says so."""
    prompt = clear_prompt(folder, 40, LONG)
    for number in range(100):
        request = token_request(MODEL, prompt, LONG, cacheable=False, salt=f"{victim} {number}".encode())
        stream, tokens, is_killed = await fleet.gateway.dispatcher.submit(request), list[int](), False
        async for delta in stream:
            tokens += delta.token_ids
            call = stream.state.choices[0].call
            if len(tokens) >= 2 and not is_killed and call is not None and call.worker_id == victim:
                is_killed = True
                fleet.services.pop(victim).kill()
        assert tokens == greedy(folder, prompt, LONG)
        if is_killed:
            break
        assert not stream.state.history.seams
    assert is_killed, f"none of 100 requests went to {victim}"
    (seam,) = stream.state.history.seams
    assert (seam.before.worker_id, seam.after.worker_id) == (victim, heir)
    assert seam.before.numerics_class != seam.after.numerics_class
    assert stream.usage.num_seams == 1


PAIRS = (
    ("prefill", "prefill-ours", OURS),
    ("decode", "decode-ours", OURS),
    ("prefill", "prefill-vllm", VLLM),
    ("decode", "decode-vllm", VLLM),
)


async def test_under_class_an_answer_stays_with_its_engine_and_goes_on_flagged_when_the_engine_dies(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder, seen = checkpoint("demo"), Counter[tuple[str, ...]]()
    async with fleet_of(tmp_path, "class", *PAIRS) as fleet:
        # 1. one model, two classes: hash roots are equal, blocks are not shared
        ours, vllm = card(fleet, "decode-ours"), card(fleet, "decode-vllm")
        assert ours.fingerprint.numerics_class != vllm.fingerprint.numerics_class
        assert model_identity(ours.fingerprint) == model_identity(vllm.fingerprint)
        assert space_of(ours) == space_of(card(fleet, "prefill-ours"))
        assert space_of(vllm) == space_of(card(fleet, "prefill-vllm"))
        assert space_of(ours) != space_of(vllm)
        # 2. both get requests, and no answer is of two classes
        prompt = clear_prompt(folder, 64, NUM_TOKENS)
        for number in range(200):
            stream, tokens = await answered(fleet, prompt, salt=str(number).encode())
            assert tokens == greedy(folder, prompt, NUM_TOKENS)
            assert not stream.state.history.seams
            seen[tuple(sorted(call.worker_id for call in stream.state.history.calls))] += 1
            if number >= 20 and len(seen) == 2:
                break
        assert set(seen) == {("decode-ours", "prefill-ours"), ("decode-vllm", "prefill-vllm")}
        await fleet.pools_are_full()
        # 3. either way: the class of an answer dies
        await lost(fleet, folder, "decode-ours", "decode-vllm")
        fleet.start("decode", "decode-ours-2", *OURS, "--exactness", "class")
        await fleet.ready("decode-ours-2", seconds=START_SECONDS)
        await lost(fleet, folder, "decode-vllm", "decode-ours-2")
        await fleet.pools_are_full()


async def test_under_layout_each_engine_goes_on_with_what_the_other_has_computed(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("demo")
    async with fleet_of(tmp_path, "layout", *PAIRS) as fleet:
        cards = {name: card(fleet, name) for _, name, _ in PAIRS}
        assert len({space_of(each) for each in cards.values()}) == 1
        assert {cards["decode-ours"].block_size, cards["decode-vllm"].block_size} == {16, 32}
        orders = {each.layout.groups[0].order for each in cards.values()}
        assert len(orders) == 2 and not any(order.startswith("vllm-") for order in orders)
        for ours, theirs in (("prefill-ours", "decode-vllm"), ("prefill-vllm", "decode-ours")):
            await fleet.handed_over(MODEL, ours, theirs)
            dispatcher, group = fleet.dispatcher(theirs, ours), cards[ours].layout.groups[0]
            for length in (1, 16, 33, 64, 100, 150):
                prompt = clear_prompt(folder, length, NUM_TOKENS)
                stream = await dispatcher.submit(token_request(MODEL, prompt, NUM_TOKENS, cacheable=False))
                tokens = [token async for delta in stream for token in delta.token_ids]
                what = f"{ours} to {theirs}, {length} tokens"
                assert tokens == greedy(folder, prompt, NUM_TOKENS), what
                (choice,) = stream.state.choices
                assert choice.ledger is not None, what
                ledger = choice.ledger
                assert (ledger.num_computed_tokens, ledger.num_reprefill_tokens) == (0, 0), what
                # what is pulled has the layout of prefill
                assert ledger.num_bytes_pulled == -(-length // group.tokens_per_block) * group.bytes_per_block, what
                assert stream.usage.num_computed_tokens == length, what
                # the first token is of prefill's class, and the answer says so
                (seam,) = stream.state.history.seams
                assert (seam.before.worker_id, seam.after.worker_id) == (ours, theirs), what
        await fleet.pools_are_full()
        # what the store has of one engine is never read as the other's, and what a pool has is found again
        for first, second in ("ours", "vllm"), ("vllm", "ours"):
            prompt = clear_prompt(folder, 150, NUM_TOKENS, first_seed=1000)
            for prefill, decode in ((first, second), (second, first), (first, first), (second, second)):
                request = token_request(MODEL, prompt, NUM_TOKENS, account=f"from {first}")
                dispatcher = fleet.dispatcher(f"decode-{decode}", f"prefill-{prefill}")
                (tokens,) = await tokens_of(dispatcher, request)
                assert tokens == greedy(folder, prompt, NUM_TOKENS), f"{prefill} to {decode}, first {first}"
        await fleet.pools_are_full()
