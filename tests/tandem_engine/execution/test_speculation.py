"""Tests that tokens with drafts are those without drafts, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem_engine.core import EngineCore
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.grammar import Grammar
from tandem_engine.messages import AddRequest, RequestOutput
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.drafters import Draft

NUM_ANSWER_TOKENS = 24
ASKS = {
    "greedy": SamplingParams(NUM_ANSWER_TOKENS, temperature=0.0),
    "sampled": SamplingParams(NUM_ANSWER_TOKENS, seed=5, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01),
    "penalties": SamplingParams(
        NUM_ANSWER_TOKENS, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
    ),
    "greedy with penalties": SamplingParams(NUM_ANSWER_TOKENS, temperature=0.0, frequency_penalty=0.7),
    "logprobs": SamplingParams(NUM_ANSWER_TOKENS, temperature=0.0, num_logprobs=3),
    "min tokens": SamplingParams(
        NUM_ANSWER_TOKENS, seed=7, min_tokens=10, stop_token_ids=tuple(range(2, 320, 2)), logit_bias={9: 3.0}
    ),
    "grammar": SamplingParams(
        NUM_ANSWER_TOKENS, seed=8, grammar=Grammar("regex", "([a-z]{2,4} )+[.]"), min_tokens=9, stop_token_ids=(1,)
    ),
    "short": SamplingParams(3, temperature=0.0),
}


class Oracle:
    """Drafts what an earlier run answered, sometimes wrong, in random lengths."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers
        self._random = random.Random(1)

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        first = request.num_tokens - request.num_prompt_tokens
        token_ids = self._answers[request.request_id][first : first + self._random.randint(1, max_tokens)]
        token_ids = [each if self._random.random() < 0.85 else 3 for each in token_ids]
        return Draft(token_ids, 16) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def outputs_of(core: EngineCore, prompts: Sequence[Sequence[int]]) -> dict[str, list[RequestOutput]]:
    """Send every prompt with all sampling parameters at once."""
    outputs: dict[str, list[RequestOutput]] = {}
    for number, prompt in enumerate(prompts):
        for name, sampling in ASKS.items():
            outputs[f"{name} {number}"] = []
            core.handle(AddRequest(f"{name} {number}", list(prompt), len(prompt), sampling))
    while core.has_work():
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def answers_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {name: [token for each in of_one for token in each.token_ids] for name, of_one in outputs.items()}


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(2, 320, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"block_size": 4}),
        ("llama", {"kernels": "torch"}),
        ("qwen2", {"block_size": 4}),
        ("mistral", {"block_size": 4}),  # whose window is shorter than the answers
        ("gemma2", {}),
    ],
)
def test_guesses_change_no_token_and_no_log_probability(
    kind: str, settings: dict[str, Any], make_engine: Callable[..., Any]
) -> None:
    prompts = random_prompts([1, 15, 40])
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings
    plain = outputs_of(make_engine(kind, speculation="off", **settings).core, prompts)
    core = make_engine(kind, **settings).core
    core.scheduler.speculator.use([Oracle(answers_of(plain))])
    guessed = outputs_of(core, prompts)
    assert answers_of(guessed) == answers_of(plain)
    for name, of_one in plain.items():
        assert [logprobs for each in guessed[name] for logprobs in each.logprobs] == [
            logprobs for each in of_one for logprobs in each.logprobs
        ]
        assert guessed[name][-1].finish_reason == of_one[-1].finish_reason
    counters = core.scheduler.stats().counters
    assert counters["draft_tokens"] > counters["draft_tokens_accepted"] > 50
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks


def test_an_answer_that_repeats_its_prompt_takes_fewer_steps(make_engine: Callable[..., Any]) -> None:
    prompt = [7, 8, 9, 10] * 6
    asks = {"loop": SamplingParams(48, temperature=0.0, logit_bias={7: 60.0, 8: 90.0}, frequency_penalty=1.5)}
    plain, auto = make_engine("llama", speculation="off"), make_engine("llama")
    outputs = []
    for engine in (plain, auto):
        for name, sampling in asks.items():
            engine.core.handle(AddRequest(name, prompt, len(prompt), sampling))
        taken = []
        while engine.core.has_work():
            taken += engine.core.step().outputs
        outputs.append(taken)
    assert [t for each in outputs[0] for t in each.token_ids] == [t for each in outputs[1] for t in each.token_ids]
    assert outputs[1][-1].num_accepted_tokens > 0
    assert len(outputs[1]) < len(outputs[0])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_row_has_the_same_bits_behind_guesses_as_alone(kernels: str, make_engine: Callable[..., Any]) -> None:
    """Tokens one by one, and the same tokens as right drafts: equal logits, row by row."""
    engines = [make_engine("llama", kernels=kernels, speculation=each) for each in ("off", "auto")]
    (prompt,) = random_prompts([33])
    sampling = SamplingParams(9, temperature=0.0)
    rows: list[list[torch.Tensor]] = []
    answers: list[list[int]] = []
    for number, engine in enumerate(engines):
        if number:
            engine.core.scheduler.speculator.use([_Known(answers[0])])
        rows.append(_logits_of(engine.core.runner))
        engine.core.handle(AddRequest("a", prompt, len(prompt), sampling))
        answers.append([])
        while engine.core.has_work():
            answers[-1] += [token for output in engine.core.step().outputs for token in output.token_ids]
    assert answers[0] == answers[1]
    one_by_one, together = (torch.cat(each) for each in rows)
    assert len(rows[1]) < len(rows[0])
    assert torch.equal(one_by_one, together)


class _Known:
    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        first = request.num_tokens - request.num_prompt_tokens
        token_ids = self._answer[first : first + max_tokens]
        return Draft(token_ids, 16) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def _logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Keep what the model of a runner returns."""
    kept: list[torch.Tensor] = []
    forward = runner._model.forward

    def keeping(*arguments: Any) -> torch.Tensor:
        kept.append(forward(*arguments))
        return kept[-1]

    vars(runner._model)["forward"] = keeping
    return kept


def test_blocks_that_right_guesses_filled_are_staged_for_readers(make_engine: Callable[..., Any]) -> None:
    core = make_engine("llama", block_size=4, kv_staging="always").core
    cache, slots = core.runner._cache, core.publisher._memory.slots
    (prompt,) = random_prompts([6])
    plain = answers_of(outputs_of(make_engine("llama", speculation="off", block_size=4).core, [prompt]))
    core.scheduler.speculator.use([_Known(plain["greedy 0"])])
    root = "ab" * 16
    core.handle(AddRequest("a", prompt, len(prompt), ASKS["greedy"], hash_root=root))
    request, table, num_filled = core.scheduler._requests["a"], [], 0
    while core.has_work():
        table = request.block_table
        done = core.step()
        table = request.block_table or table  # the last step empties it
        for filled in done.filled:
            for slot in filled.slots:
                content = slots.bytes_of(slot).tobytes()
                assert content == cache.read_block(table[num_filled]), "reported before readers can see it"
                assert any(content)
                num_filled += 1
    assert num_filled == (len(prompt) + NUM_ANSWER_TOKENS - 1) // 4
    assert core.scheduler.stats().counters["draft_tokens_accepted"] > 10
