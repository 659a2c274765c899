"""Workers with vLLM hand over as our own engine does, where TANDEM_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.system.fleet import Fleet, token_request

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
MODEL = "@tandem/demo"
ENGINE = ("--engine", "vllm", "--vllm-python", PYTHON)
FLAGS = (*ENGINE, "--num-threads", "1", "--max-model-len", "1000", "--num-kv-blocks", "128")
BLOCK = 32
PROMPT = list(range(20, 90))

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


async def test_prefill_and_decode_with_vllm_hand_over_exactly(tmp_path: Path) -> None:
    async with Fleet(tmp_path, hash_grain=16) as fleet:
        fleet.start("kv", "kv-a")
        fleet.start("prefill", "prefill-a", *FLAGS)
        fleet.start("decode", "decode-a", *FLAGS)
        await fleet.ready()
        await fleet.handed_over(MODEL, "prefill-a", "decode-a")

        alone, _ = await answer(fleet, token_request(MODEL, PROMPT, 12, cacheable=False), None)
        tokens, stream = await answer(fleet, token_request(MODEL, PROMPT, 12, cacheable=False), "prefill-a")
        assert tokens == alone
        [choice] = stream.state.choices
        assert choice.ledger is not None
        assert (choice.ledger.num_computed_tokens, choice.ledger.num_reprefill_tokens) == (0, 0)
        bytes_per_block = (await fleet.stats("decode-a")).kv.bytes_per_block
        assert choice.ledger.num_bytes_pulled == -(-len(PROMPT) // BLOCK) * bytes_per_block
        await fleet.pools_are_full()


async def answer(fleet: Fleet, request: TokenRequest, prefill: str | None) -> tuple[list[int], RequestStream]:
    stream = await fleet.dispatcher("decode-a", prefill).submit(request)
    async for _ in stream:
        pass
    [choice] = stream.state.choices
    return list(choice.tokens), stream
