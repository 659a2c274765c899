"""Weights of 8 bits, in the format of compressed-tensors, served by prefill and decode workers with vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.vllm_parity.handed_over import answers_by_two
from benchmarks.vllm_parity.sides import WORKER_FLAGS, ask_alone, serving
from benchmarks.vllm_parity.work import prompts, requests
from tandem_worker.vllm_program import vllm_program
from tests.checkpoints import QUANTISED, make_wide_checkpoint

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
NUM_PROMPTS = 6

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


async def test_a_quantised_model_answers_as_vllm_alone_and_computes_no_prompt_twice(tmp_path: Path) -> None:
    folder = make_wide_checkpoint(tmp_path, QUANTISED)
    asked = requests({"greedy": NUM_PROMPTS, "seeded": 2}, seed=3)
    alone = await ask_alone(PYTHON, folder, tmp_path, prompts(NUM_PROMPTS, 3), 0)
    async with serving(vllm_program(PYTHON, tmp_path), folder) as engine:
        assert engine.ready.model.quantization == "compressed-tensors", "a part of the model's identity"
        whole = await engine.answers([each.request() for each in asked])
    assert [whole[each.name] for each in asked if each.kind == "greedy"] == list(alone.tokens)
    handed = await answers_by_two(PYTHON, folder, tmp_path, asked, WORKER_FLAGS)
    assert {name: list(each.tokens) for name, each in handed.items()} == whole
    assert all(each.num_computed_tokens == 0 < each.num_bytes_pulled for each in handed.values())
