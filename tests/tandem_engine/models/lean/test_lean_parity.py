"""The decoder gives the logits of transformers for every family, and the same bits for every cut of the work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.registry import FAMILIES
from tandem_engine.ops.base import Ops
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.models.lean.kinds import CONFIGS, VOCAB_SIZE, WINDOW
from tests.tandem_engine.models.lean.runner import Runner, cut
from tests.tandem_engine.steps import step_of

NUM_ANSWER_TOKENS = 16
MIN_MARGIN = 1e-3
TOLERANCE = 1e-4
LENGTHS = (1, 70, 33)
assert max(LENGTHS) > 4 * WINDOW


def _prompts(seed: int = 4) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCAB_SIZE, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(make_kind: Callable[..., Path]) -> Callable[[str], list[tuple[torch.Tensor, list[int]]]]:
    """Return the logits and answers of transformers to each prompt; computed once per kind."""
    return functools.cache(lambda kind: [_greedy(_reference(make_kind(kind)), prompt) for prompt in _prompts()])


def _reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return the prompt's logits and the dense greedy answer, after checking that every step has a clear winner."""
    ids = list(prompt)
    prompt_logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for _ in range(NUM_ANSWER_TOKENS):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        (first, second), (token, _) = (values.tolist() for values in logits.topk(2))
        assert first - second > MIN_MARGIN, "another seed is needed: this prompt proves nothing"
        ids.append(int(token))
    return prompt_logits, ids[len(prompt) :]


def _runner(decoder: Decoder, block_size: int = 16) -> Runner:
    runner = Runner(decoder, block_size, num_blocks=-(-400 // block_size))
    for prompt in _prompts():
        runner.add(prompt)
    return runner


def test_every_family_is_among_the_kinds() -> None:
    assert {make().model_type for make in CONFIGS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_chunks_among_neighbours_then_decodes_equal_transformers(
    kind: str, ops: Ops, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder], expected: Any
) -> None:
    runner = _runner(load_folder(make_kind(kind), ops))
    computed = runner.logits(cut(LENGTHS, seed=1))
    answers = runner.decode_greedily(NUM_ANSWER_TOKENS)
    for (expected_logits, expected_answer), logits, answer in zip(expected(kind), computed, answers, strict=True):
        error = (logits - expected_logits).abs().max() / expected_logits.abs().max()
        assert error < TOLERANCE, f"relative error {error:.1e}"
        assert answer == expected_answer


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_have_the_same_bits_alone_whole_cut_and_among_neighbours(
    kind: str, ops: Ops, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    decoder = load_folder(make_kind(kind), ops)
    whole = [_runner(decoder).step([(request, 0, length)]) for request, length in enumerate(LENGTHS)]
    for seed in (2, 3):
        for logits, expected in zip(_runner(decoder).logits(cut(LENGTHS, seed)), whole, strict=True):
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", ["gemma2", "mixtral", "qwen3-moe"])
def test_the_torch_ops_give_the_same_bits_on_more_threads(
    kind: str, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    decoder = load_folder(make_kind(kind), TorchOps())
    whole = [_runner(decoder).step([(request, 0, length)]) for request, length in enumerate(LENGTHS)]
    torch.set_num_threads(2)
    try:
        again = load_folder(make_kind(kind), TorchOps())
        for logits, expected in zip(_runner(again).logits(cut(LENGTHS, 5)), whole, strict=True):
            assert torch.equal(logits, expected)
    finally:
        torch.set_num_threads(1)


def test_a_blocks_size_does_not_change_the_answer(
    ops: Ops, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    decoder = load_folder(make_kind("gemma2"), ops)
    answers = []
    for block_size in (4, 16, 64):
        runner = _runner(decoder, block_size)
        runner.logits(cut(LENGTHS, seed=1))
        answers.append(runner.decode_greedily(NUM_ANSWER_TOKENS))
    assert answers[0] == answers[1] == answers[2]


def test_a_step_without_samples_only_writes_kv(
    ops: Ops, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    decoder = load_folder(make_kind("qwen3"), ops)
    straight, silent = _runner(decoder), _runner(decoder)
    expected = straight.step([(1, 0, 40)])[-1:]
    assert torch.equal(silent.step([(1, 0, 40)], last_only=True), expected)
    step = step_of(ops, torch.arange(2), torch.tensor([3, 4]), [])
    no_rows = torch.empty(0, dtype=torch.int64)
    assert decoder.forward(torch.tensor([5, 6]), step, silent.pool, no_rows).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "mixtral", "gemma3"])
def test_a_bf16_checkpoint_stays_bf16_and_gives_the_bits_of_its_weights_widened(
    kind: str, ops: Ops, make_kind: Callable[..., Path], load_folder: Callable[..., Decoder]
) -> None:
    folder = make_kind(kind, torch.bfloat16)
    kept, widened = load_folder(folder, ops), load_folder(folder, ops, dtype="float32")
    assert ops.unpack(kept.weights.linears["head"]).dtype == torch.bfloat16
    assert kept.weights.num_bytes < 0.6 * widened.weights.num_bytes
    for mine, theirs in zip(*(_runner(decoder).logits(cut(LENGTHS, 4)) for decoder in (kept, widened)), strict=True):
        assert torch.equal(mine, theirs)
    expected = _reference(folder)(torch.tensor([_prompts()[1]])).logits[0]
    logits = _runner(kept).step([(1, 0, LENGTHS[1])])
    assert (logits - expected).abs().max() / expected.abs().max() < TOLERANCE
