"""Ranks of tensor and of pipeline parallelism: they answer as one rank, and a killed engine leaves none."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem_engine.client import EngineClient
from tandem_engine.grammar import Grammar
from tandem_engine.messages import AbortRequest, EngineFailed, Ready, RequestAborted, StepDone
from tandem_engine.sampling_params import SamplingParams
from tandem_worker.vllm_program import vllm_program
from tests.tandem_vllm.test_vllm_process import answer, asked, config, next_of

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM")

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=16, temperature=0.0),
    "seeded": SamplingParams(max_tokens=16, seed=3, temperature=1.2, frequency_penalty=0.7, min_tokens=12),
    "JSON": SamplingParams(max_tokens=16, temperature=0.0, grammar=Grammar("json_object")),
}


@asynccontextmanager
async def serving(folder: Path, *flags: str, **settings: Any) -> AsyncIterator[tuple[EngineClient, Any, Ready]]:
    """Start an engine and kill it in the end; its ranks must end with it."""
    client = await EngineClient.start(config(engine_args=flags, **settings), vllm_program(PYTHON, folder))
    events = client.events()
    try:
        ready = await next_of(events, Ready, EngineFailed)
        assert isinstance(ready, Ready), ready
        yield client, events, ready
        ranks = psutil.Process(client.pid).children(recursive=True)
    finally:
        psutil.Process(client.pid).kill()
        await client.stop()
    psutil.wait_procs(ranks, timeout=30)
    assert not [rank for rank in ranks if rank.is_running()]


async def answers(client: EngineClient, events: Any) -> dict[str, list[int]]:
    """Return the answers, each also after a move."""
    found = {name: await answer(client, events, asked(name, each)) for name, each in SAMPLINGS.items()}
    for name, each in SAMPLINGS.items():
        moved = await answer(client, events, asked(f"{name}, moved", each, found[name][:3]))
        assert found[name][:3] + moved == found[name]
    return found


async def answers_at_once(client: EngineClient, events: Any, num_each: int) -> dict[str, list[int]]:
    """Ask for all at once, so that several batches are in flight, and abort one of each kind after its first token."""
    found: dict[str, list[int]] = {}
    for number in range(num_each):
        for name, sampling in SAMPLINGS.items():
            found[f"{name} {number}"] = []
            client.send(asked(f"{name} {number}", sampling))
    open_requests, aborted = set(found), {f"{name} 0" for name in SAMPLINGS}
    last: StepDone | None = None
    while open_requests:
        event = await next_of(events, StepDone, RequestAborted)
        if isinstance(event, RequestAborted):
            open_requests.discard(event.request_id)
            continue
        last = event
        for output in event.outputs:
            assert output.request_id in open_requests, "a token after the end, or after an abort"
            found[output.request_id] += output.token_ids
            if output.is_last:
                open_requests.discard(output.request_id)
            elif output.request_id in aborted and output.num_generated_tokens == 1:
                client.send(AbortRequest(output.request_id))
    client.send(AbortRequest("nobody"))  # an answer when nothing runs any more
    last = await next_of(events, StepDone)
    assert (last.stats.num_running, last.stats.num_waiting, last.stats.num_used_blocks) == (0, 0, 0)
    return {name: tokens for name, tokens in found.items() if name not in aborted}


_OF_ONE_RANK: dict[str, list[int]] = {}
"""Filled by the first test that needs it: an engine takes half a minute to start."""


async def of_one_rank(folder: Path) -> dict[str, list[int]]:
    if not _OF_ONE_RANK:
        async with serving(folder) as (client, events, ready):
            assert "/tp1/" in ready.model.numerics_class
            _OF_ONE_RANK.update(await answers(client, events))
    return _OF_ONE_RANK


@pytest.mark.parametrize(
    ("flags", "named"), [("--tensor-parallel-size 2", "/tp2/"), ("--pipeline-parallel-size 2", "/tp1-pp2/")]
)
async def test_two_ranks_answer_as_one(flags: str, named: str, tmp_path: Path) -> None:
    expected = await of_one_rank(tmp_path)
    async with serving(tmp_path, *flags.split(), max_num_batched_tokens=64) as (client, events, ready):
        assert named in ready.model.numerics_class
        assert await answers(client, events) == expected
        at_once = await answers_at_once(client, events, num_each=4)
        assert {name: tokens for name, tokens in at_once.items() if tokens != expected[name.split()[0]]} == {}
