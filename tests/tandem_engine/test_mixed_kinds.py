"""Tests that a mixed pair of engines answers as one engine does: the blocks between them are converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tandem_engine.mixed_pairs import RecordedEngine, answer_alone, answer_of_pair, compare, some_prompts

CLOSE = 5e-4
"""Most that a logit may differ in float32; the demo model's differ by 1e-4 at most (`mixed_pairs`)."""


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (8, 32), (5, 16)])
def test_a_mixed_pair_gives_the_logits_of_one_engine(
    kind: str, prefill_size: int, decode_size: int, make_checkpoint: Callable[[str], Path]
) -> None:
    """Windows are 16 tokens long: of all layers of mistral, of some of gemma."""
    model = str(make_checkpoint(kind))
    one = RecordedEngine(model, kernels="torch", dtype="float32")
    prefill = RecordedEngine(model, dtype="float32", block_size=prefill_size, region_id="prefill")
    decode = RecordedEngine(model, kernels="torch", dtype="float32", block_size=decode_size)
    for prompt in some_prompts(5, longest=90):
        found = compare(answer_alone(one, prompt, 12), answer_of_pair(prefill, decode, prompt, 12))
        assert found.largest_difference < CLOSE
        assert found.position is None or found.lead < 2 * CLOSE, f"{len(prompt)} tokens"
    for engine in (prefill, decode):
        engine.core.scheduler.pool.check()
        assert engine.core.scheduler.stats().num_used_blocks == 0


def test_bfloat16_blocks_are_read_in_float32(make_checkpoint: Callable[[str], Path]) -> None:
    model = str(make_checkpoint("llama"))
    prefill = RecordedEngine(model, dtype="bfloat16", route="transformers", region_id="prefill")
    decode = RecordedEngine(model, dtype="float32", block_size=32)
    assert prefill.engine.ready.layout.dtype == "bfloat16" != decode.engine.ready.layout.dtype
    for prompt in some_prompts(3, longest=60):
        assert len(answer_of_pair(prefill, decode, prompt, 8).tokens) == 8
