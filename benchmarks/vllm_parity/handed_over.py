"""Asks a fleet of one prefill and one decode worker with vLLM, so that each answer's prompt is handed over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import asdict

from benchmarks.vllm_parity.work import Asked
from tests.system.fleet import Fleet, token_request

_NUM_AT_ONCE = 24
_SECONDS = 600.0


@dataclass(frozen=True)
class HandedOver:
    """One answer, and what its decode worker did for its prompt."""

    tokens: Sequence[int]
    num_computed_tokens: int
    """Prompt tokens that decode has computed: 0 unless its blocks were lost."""
    num_bytes_pulled: int


async def answers_by_two(
    python: str, model: Path, folder: Path, asked: Sequence[Asked], flags: Sequence[str]
) -> Mapping[str, HandedOver]:
    """Return the answers by name; `folder` exists. Raises AssertionError if blocks are held when all have ended."""
    taken = ("--model", str(model), "--engine", "vllm", "--vllm-python", python, "--num-threads", "1", *flags)
    async with Fleet(folder, hash_grain=16) as fleet:
        fleet.start("kv", "kv-a")
        for role in ("prefill", "decode"):
            fleet.start(role, f"{role}-a", *taken)
        await fleet.ready()
        worker = fleet.worker("decode-a")
        assert worker is not None, "ready"
        model_id = worker.info.card.model_id
        await fleet.handed_over(model_id, "prefill-a", "decode-a")
        places = asyncio.Semaphore(_NUM_AT_ONCE)

        async def answer(each: Asked) -> HandedOver:
            sampling = {**asdict(each.sampling), "cacheable": False, "deadline": time.monotonic() + _SECONDS}
            seeds = (each.sampling.seed,)
            request = token_request(model_id, each.prompt, sampling.pop("max_tokens"), choice_seeds=seeds, **sampling)
            async with places:
                stream = await fleet.dispatcher("decode-a", "prefill-a").submit(request)
                async for _ in stream:
                    pass
            [choice] = stream.state.choices
            ledger = choice.ledger
            assert ledger is not None, f"{each.name} has no ledger"
            return HandedOver(choice.tokens, ledger.num_computed_tokens, ledger.num_bytes_pulled)

        found = await asyncio.gather(*(answer(each) for each in asked))
        await fleet.pools_are_full(60)
    return dict(zip((each.name for each in asked), found, strict=True))
