"""Tests that sampling is pure, respects its limits, and follows the softmax distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.core import RequestsFailed
from tandem_engine.execution.sampler import Draw, gumbel_noise, sample
from tandem_engine.sampling_params import SamplingParams

VOCAB_SIZE = 50


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, VOCAB_SIZE)).astype(np.float32))


def _draw(
    params: SamplingParams,
    token_ids: Sequence[int] = (3, 4, 5),
    num_prompt_tokens: int = 3,
    seeds: Sequence[int] | None = None,
    name: str = "a",
) -> Draw:
    return Draw(name, params, [params.seed] if seeds is None else seeds, token_ids, num_prompt_tokens)


def _one(logits: torch.Tensor, draw: Draw) -> int:
    return sample(logits, [draw])[draw.request_id][0].token_id


def _drawn(logits: torch.Tensor, params: SamplingParams, times: int = 300) -> set[int]:
    return {token.token_id for token in sample(logits, [_draw(params, seeds=range(times))])["a"]}


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 9]] = 1.0
    assert _one(logits, _draw(SamplingParams(1, temperature=0.0))) == 7
    assert _one(logits, _draw(SamplingParams(1, temperature=0.0, logit_bias={20: 1.0}))) == 7


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 5), st.sampled_from([0.3, 1.0, 1.7]))
def test_a_token_depends_on_seed_and_position_and_not_on_neighbours(
    seed: int, num_neighbours: int, temperature: float
) -> None:
    params = SamplingParams(1, seed=seed, temperature=temperature, top_p=0.9)
    logits = _logits(1, 1 + num_neighbours)
    neighbours = [_draw(SamplingParams(1, seed=row), name=str(row)) for row in range(num_neighbours)]
    alone = _one(logits[-1:], _draw(params))
    assert sample(logits, [*neighbours, _draw(params)])["a"][0].token_id == alone
    assert _one(logits[-1:], _draw(params, token_ids=(9, 9, 9))) == alone, "only their number counts"


def test_choices_are_the_same_as_requests_of_their_own() -> None:
    logits, params = _logits(2), SamplingParams(1)
    together = [token.token_id for token in sample(logits, [_draw(params, seeds=[1, 2, 3])])["a"]]
    apart = [_one(logits, _draw(SamplingParams(1, seed=seed))) for seed in (1, 2, 3)]
    assert together == apart


def test_noise_of_a_token_does_not_depend_on_which_others_are_left() -> None:
    everything = gumbel_noise(5, 9, np.arange(VOCAB_SIZE), VOCAB_SIZE)
    some = np.array([3, 17, 40])
    assert (gumbel_noise(5, 9, some, VOCAB_SIZE) == everything[some]).all()
    assert (gumbel_noise(5, 10, some, VOCAB_SIZE) != everything[some]).all()
    assert np.isfinite(gumbel_noise(0, 0, np.arange(200_000), 200_000)).all()


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    times = 4000
    tokens = [token.token_id for token in sample(logits, [_draw(SamplingParams(1), seeds=range(times))])["a"]]
    counts = np.bincount(tokens, minlength=4)
    expected = torch.softmax(logits[0], -1).numpy() * times
    assert ((counts - expected) ** 2 / expected).sum() < 16.3, "chi-square, 3 degrees of freedom, p = 0.001"


def test_top_k_leaves_k_tokens() -> None:
    logits = _logits(3)
    best = set(logits[0].topk(4).indices.tolist())
    assert _drawn(logits, SamplingParams(1, top_k=4, temperature=5.0)) == best


def test_top_k_of_equals_takes_the_lower_ids() -> None:
    assert _drawn(torch.zeros(1, VOCAB_SIZE), SamplingParams(1, top_k=2)) == {0, 1}


def test_top_p_leaves_the_fewest_tokens_that_reach_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert _drawn(logits, SamplingParams(1, top_p=0.79)) == {0, 1}
    assert _drawn(logits, SamplingParams(1, top_p=0.81)) == {0, 1, 2}
    assert _drawn(logits, SamplingParams(1, top_p=1e-9)) == {0}


def test_min_p_leaves_tokens_near_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert _drawn(logits, SamplingParams(1, min_p=0.5)) == {0, 1}
    assert _drawn(logits, SamplingParams(1, min_p=1.0)) == {0}


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = 50.0
    params = SamplingParams(9, temperature=0.0, stop_token_ids=(7,), min_tokens=2)
    assert _one(logits, _draw(params, token_ids=(1, 2, 3, 4), num_prompt_tokens=3)) == 0
    assert _one(logits, _draw(params, token_ids=(1, 2, 3, 4, 5), num_prompt_tokens=3)) == 7


def _penalised_slowly(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    out = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in set(prompt + answer):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(answer):
        out[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    return out


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
    st.floats(0.5, 3.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
def test_penalties_are_those_of_a_slow_reference(
    prompt: list[int], answer: list[int], repetition: float, frequency: float, presence: float
) -> None:
    params = SamplingParams(
        1,
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias={2: 3.0, 11: -100.0},
    )
    logits = _logits(4)
    expected = _penalised_slowly(logits[0].tolist(), params, prompt, answer)
    token = _one(logits, _draw(params, token_ids=prompt + answer, num_prompt_tokens=len(prompt)))
    assert expected[token] == pytest.approx(max(expected), abs=1e-6)


def test_logprobs_are_the_log_softmax_of_raw_logits_and_leave_the_token_alone() -> None:
    logits = _logits(5)
    biased = {"logit_bias": {9: 20.0}, "temperature": 0.7}
    (with_them,) = sample(logits, [_draw(SamplingParams(1, num_logprobs=3, **biased))])["a"]  # type: ignore[arg-type]
    assert with_them.token_id == _one(logits, _draw(SamplingParams(1, **biased))) == 9  # type: ignore[arg-type]
    assert with_them.logprobs is not None
    reference = torch.log_softmax(logits[0].double(), -1)
    assert with_them.logprobs.chosen.logprob == pytest.approx(reference[9].item(), abs=1e-9)
    assert with_them.logprobs.chosen.rank == 1 + int((reference > reference[9]).sum())
    values, ids = reference.topk(3)
    assert [entry.token_id for entry in with_them.logprobs.top] == ids.tolist()
    assert [entry.logprob for entry in with_them.logprobs.top] == pytest.approx(values.tolist(), abs=1e-9)
    assert [entry.rank for entry in with_them.logprobs.top] == [1, 2, 3]
    assert math.isclose(float(torch.exp(reference).sum()), 1.0)


def test_greedy_with_logprobs_takes_the_same_token() -> None:
    logits = _logits(6)
    plain = _one(logits, _draw(SamplingParams(1, temperature=0.0)))
    assert _one(logits, _draw(SamplingParams(1, temperature=0.0, num_logprobs=0))) == plain


def test_logits_that_are_no_numbers_name_their_request() -> None:
    logits = _logits(7, 2)
    logits[1, 3] = torch.nan
    with pytest.raises(RequestsFailed) as failure:
        sample(logits, [_draw(SamplingParams(1), name="good"), _draw(SamplingParams(1), name="bad")])
    assert failure.value.request_ids == ("bad",)


def test_logits_of_no_use_for_two_reasons_name_both_requests_and_harm_no_third() -> None:
    logits = _logits(8, 3)
    logits[1, 3] = torch.nan
    everything = SamplingParams(9, min_tokens=3, stop_token_ids=tuple(range(VOCAB_SIZE)))
    with pytest.raises(RequestsFailed) as failure:
        sample(logits, [_draw(SamplingParams(1), name="good"), _draw(SamplingParams(1), name="nan"), _draw(everything)])
    assert set(failure.value.request_ids) == {"nan", "a"}
