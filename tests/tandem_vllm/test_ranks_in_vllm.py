"""Two ranks of tensor parallelism: the draw of the ranks is the core's, and nothing is left of a killed engine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tandem_engine.client import EngineClient
from tandem_engine.grammar import Grammar
from tandem_engine.messages import EngineFailed, Ready
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


async def answers(folder: Path, *flags: str) -> tuple[str, dict[str, list[int]]]:
    """Return the class and the answers, each also after a move; then kill the engine, whose ranks must end with it."""
    client = await EngineClient.start(config(engine_args=flags), vllm_program(PYTHON, folder))
    events = client.events()
    try:
        ready = await next_of(events, Ready, EngineFailed)
        assert isinstance(ready, Ready), ready
        found = {name: await answer(client, events, asked(name, each)) for name, each in SAMPLINGS.items()}
        for name, each in SAMPLINGS.items():
            moved = await answer(client, events, asked(f"{name}, moved", each, found[name][:3]))
            assert found[name][:3] + moved == found[name]
        ranks = psutil.Process(client.pid).children(recursive=True)
    finally:
        psutil.Process(client.pid).kill()
        await client.stop()
    psutil.wait_procs(ranks, timeout=30)
    assert not [rank for rank in ranks if rank.is_running()]
    return ready.model.numerics_class, found


async def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    of_one, expected = await answers(tmp_path)
    of_two, found = await answers(tmp_path, "--tensor-parallel-size", "2")
    assert "/tp1/" in of_one and "/tp2/" in of_two
    assert found == expected
