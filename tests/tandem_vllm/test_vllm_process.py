"""Tests the real engine process where TANDEM_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_engine.client import EngineClient
from tandem_engine.messages import AbortRequest, AddRequest, EngineFailed, Ready, RequestAborted, StepDone
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig
from tandem_worker.vllm_program import vllm_program
from tests.checkpoints import make_checkpoint

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
PROMPT = list(range(20, 90))

pytestmark = pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM")


def config(**values: Any) -> EngineConfig:
    return EngineConfig("@tandem/demo", num_threads=1, **{"num_kv_blocks": 64, "max_model_len": 1000, **values})


async def next_of(events: Any, *kinds: type[Any]) -> Any:
    """Read up to the first event of these kinds."""
    async for event, _ in events:
        if isinstance(event, kinds):
            return event
    raise AssertionError("the engine ended")


async def answer(client: EngineClient, events: Any, request: AddRequest) -> list[int]:
    client.send(request)
    tokens: list[int] = []
    while True:
        for output in (await next_of(events, StepDone)).outputs:
            tokens += output.token_ids
            if output.is_last:
                return tokens


def asked(name: str, sampling: SamplingParams, answer: Sequence[int] = ()) -> AddRequest:
    return AddRequest(name, [*PROMPT, *answer], len(PROMPT), sampling)


async def test_a_real_engine_answers_goes_on_with_a_moved_answer_and_stops(tmp_path: Path) -> None:
    client = await EngineClient.start(config(), vllm_program(PYTHON, tmp_path))
    events = client.events()
    try:
        ready = await next_of(events, Ready, EngineFailed)
        assert isinstance(ready, Ready), ready
        # 1. its card says what is not promised, and its pool holds the tokens that were asked for
        assert ready.model.context_length == 1000
        assert "batch-dependent" in ready.model.numerics_class
        assert ready.layout.tokens_per_block * ready.num_blocks == 64 * 16
        # 2. an answer that moves here after five tokens goes on as if nothing had happened
        for name, sampling in {
            "greedy": SamplingParams(max_tokens=16, temperature=0.0),
            "seeded": SamplingParams(max_tokens=16, seed=3, temperature=1.2, frequency_penalty=0.7, min_tokens=12),
        }.items():
            whole = await answer(client, events, asked(name, sampling))
            rest = await answer(client, events, asked(f"{name}, moved", sampling, whole[:5]))
            assert whole == whole[:5] + rest and len(whole) == 16
        # 3. an aborted request leaves nothing
        client.send(asked("aborted", SamplingParams(max_tokens=900, temperature=0.0)))
        client.send(AbortRequest("aborted"))
        assert (await next_of(events, RequestAborted)).request_id == "aborted"
        stats = (await next_of(events, StepDone)).stats
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    finally:
        await client.stop()
    assert client.returncode == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine_args": ("--async-scheduling",)}, "--async-scheduling"),
        ({"engine_args": ("--max-model-len", "99")}, "--max-model-len"),
        ({"engine_args": ("--node-rank", "1")}, "--node-rank"),
        ({"engine_args": ("--nnodes", "2")}, "--nnodes"),
        ({"engine_args": ("--nnodes", "2", "-tp", "2", "--master-addr", "192.0.2.1")}, "192.0.2.1"),
        ({"engine_args": ("--no-such-flag",)}, "--no-such-flag"),
        ({"kv_region": "device"}, "--kv-region"),
        ({"num_kv_blocks": 62}, "--num-kv-blocks"),  # less than one longest request, which vLLM does not serve
    ],
)
async def test_what_breaks_a_promise_or_cannot_be_served_is_refused_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    client = await EngineClient.start(config(**settings), vllm_program(PYTHON, tmp_path))
    try:
        failed = await next_of(client.events(), EngineFailed, Ready)
    finally:
        await client.stop()
    assert isinstance(failed, EngineFailed) and failed.kind == "unsupported" and named in failed.message


async def test_heads_that_vllm_has_no_code_for_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, "llama")  # its heads have 16 dimensions
    client = await EngineClient.start(
        msgspec.structs.replace(config(max_model_len=500), model=str(made)), vllm_program(PYTHON, tmp_path)
    )
    try:
        failed = await next_of(client.events(), EngineFailed, Ready)
    finally:
        await client.stop()
    assert isinstance(failed, EngineFailed) and failed.kind == "unsupported"
    assert "16 dimensions" in failed.message and "--engine tandem" in failed.message
