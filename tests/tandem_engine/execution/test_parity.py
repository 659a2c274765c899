"""Tests that the paged engine generates the tokens of `transformers.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.assembly import AssembledEngine
from tandem_engine.messages import AddRequest, ExtentRef, ImportSlab, MapRegion, ReleaseHeld, SlabImported, StartDecode
from tandem_engine.sampling_params import SamplingParams

NUM_ANSWER_TOKENS = 24
MIN_MARGIN = 1e-3
KINDS = ["llama", "mistral", "qwen2", "mixtral", "gemma2", "gemma3"]


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(2, 320, length).tolist() for length in lengths]


def _reference(folder: Path, prompt: list[int]) -> list[int]:
    """Return the dense greedy answer, having checked that no step of it was a close call."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_ANSWER_TOKENS,
        min_new_tokens=NUM_ANSWER_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for scores in result.scores:
        first, second = scores[0].topk(2).values.tolist()
        assert first - second > MIN_MARGIN, "another seed is needed: this prompt proves nothing"
    answer: list[int] = result.sequences[0, len(prompt) :].tolist()
    return answer


def _greedy() -> SamplingParams:
    return SamplingParams(
        NUM_ANSWER_TOKENS, temperature=0.0, stop_token_ids=(1,), min_tokens=NUM_ANSWER_TOKENS
    )  # min_tokens as in the reference: both never say EOS


@pytest.mark.parametrize("kind", KINDS)
def test_paged_greedy_equals_generate_in_chunks_beyond_the_window_and_among_neighbours(
    kind: str, make_checkpoint: Callable[[str], Path], make_engine: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    prompts = _prompts([1, 15, 16, 33, 90])
    core = make_engine(kind, block_size=16, max_num_batched_tokens=24).core
    answers = generate(core, [(prompt, _greedy()) for prompt in prompts])
    assert answers == [_reference(make_checkpoint(kind), prompt) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size_gives_the_same_answer(
    block_size: int, make_checkpoint: Callable[[str], Path], make_engine: Callable[..., Any], generate: Any
) -> None:
    prompts = _prompts([1, 15, 16, 33, 90])[3:]
    core = make_engine("qwen2", block_size=block_size, num_kv_blocks=2048 // block_size).core
    answers = generate(core, [(prompt, _greedy()) for prompt in prompts])
    assert answers == [_reference(make_checkpoint("qwen2"), prompt) for prompt in prompts]


def _disaggregated(prefill: AssembledEngine, decode: AssembledEngine, prompt: list[int], ask: SamplingParams) -> Any:
    """Run one request through two engines that share only the prefill engine's region."""
    outputs, sealed = [], []
    prefill.core.handle(AddRequest("p", prompt, len(prompt), ask, mode="prefill"))
    while prefill.core.has_work():
        step = prefill.core.step()
        outputs += step.outputs
        sealed += step.sealed
    ready = prefill.ready
    size = ready.layout.bytes_per_block
    mapping = MapRegion(ready.region_id, ready.region_bytes, ready.num_blocks, ready.generations_offset)
    decode.core.handle(mapping, prefill.region_fds[0])
    decode.core.handle(AddRequest("d", prompt, len(prompt), ask, mode="decode"))
    for event in sealed:
        extents = [
            ExtentRef(ready.region_id, slot * size, size, slot, generation)
            for slot, generation in zip(event.slots, event.generations, strict=True)
        ]
        (imported,) = decode.core.handle(ImportSlab("d", 0, event.first_block, extents, event.group))
        assert isinstance(imported, SlabImported) and imported.error == "" and imported.num_bytes == len(extents) * size
    prefill.core.handle(ReleaseHeld("p"))
    decode.core.handle(StartDecode("d", outputs[0].token_ids))
    while decode.core.has_work():
        outputs += decode.core.step().outputs
    assert outputs[-1].num_computed_tokens == 0, "decode must not compute the prompt again"
    for engine in (prefill, decode):
        stats = engine.core.scheduler.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [1, 16, 50])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_disaggregated_equals_aggregated(
    kind: str, length: int, temperature: float, make_engine: Callable[..., Any], generate: Any
) -> None:
    (prompt,) = _prompts([length])
    ask = SamplingParams(NUM_ANSWER_TOKENS, seed=5, temperature=temperature, top_p=0.95)
    aggregated = generate(make_engine(kind).core, [(prompt, ask)])[0]
    prefill, decode = make_engine(kind, region_id="prefill", max_num_batched_tokens=24), make_engine(kind)
    assert _disaggregated(prefill, decode, prompt, ask) == aggregated


def test_sampled_answers_do_not_depend_on_neighbours_chunks_or_preemption(
    make_engine: Callable[..., Any], generate: Any
) -> None:
    asks = [
        (prompt, SamplingParams(40, seed=seed, temperature=0.7, top_k=30, frequency_penalty=0.3))
        for seed, prompt in enumerate(_prompts([40, 41, 42, 43]))
    ]
    alone = [generate(make_engine("llama").core, [ask])[0] for ask in asks]
    crowded = make_engine("llama", max_num_batched_tokens=16, num_kv_blocks=14).core
    assert generate(crowded, asks) == alone
    assert crowded.scheduler.stats().counters["preemptions"] > 0


def test_a_prompt_found_in_the_cache_gives_the_same_answer(
    make_engine: Callable[..., Any], drain: Callable[..., Any]
) -> None:
    core = make_engine("llama").core
    (prompt,) = _prompts([50])
    hashes = [bytes([index]) * 16 for index in range(3)]
    answers, cached = [], []
    for request_id in ("first", "second"):
        command = AddRequest(
            request_id,
            prompt,
            len(prompt),
            _greedy(),
            hash_root="00" * 16,
            block_hashes=[block_hash.hex() for block_hash in hashes],
        )
        core.handle(command)
        outputs = drain(core)
        answers.append([token for output in outputs for token in output.token_ids])
        cached.append(outputs[-1].num_cached_tokens)
    assert answers[0] == answers[1] and cached == [0, 48]
