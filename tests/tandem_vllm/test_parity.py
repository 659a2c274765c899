"""Tests with a real vLLM that its tokens inside Tandem are its tokens alone, and those of answers that moved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.vllm_parity.__main__ import main

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TANDEM_VLLM_PYTHON"), reason="TANDEM_VLLM_PYTHON names no interpreter"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "mistral"])
def test_tokens_are_those_of_vllm_alone_and_go_on_behind_a_move(model: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    main(["--quick", "--aggregated", "--models", model, "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert figures[f"{model}.num_wrong"] == 0
    assert figures[f"{model}.num_equal"] + figures[f"{model}.num_close_calls"] == figures[f"{model}.num_answers"] > 0
    assert figures[f"{model}.num_moved_different"] == 0 < figures[f"{model}.num_moved"]
    assert figures["num_different"] == 0 < figures["num_compared"]
