"""Does the model of step times learn what steps cost, and not what disturbs them?"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.scheduling.step_time import StepTimeModel, StepWork


def seconds_of(work: StepWork) -> float:
    """A machine: 20 ms for the weights, 1 ms per answer, 1 us per key, 1 ms per prompt token, 1 us per pair."""
    keys_and_pairs = work.num_decode_keys + work.num_prompt_pairs
    return 0.02 + 0.001 * (work.num_decodes + work.num_prompt_tokens) + 1e-6 * keys_and_pairs


def mixed_work(rng: random.Random) -> StepWork:
    num_decodes, num_prompt_tokens = rng.randrange(0, 33), rng.choice([0, 0, 16, 64, 256, 512])
    return StepWork(
        num_decodes,
        num_decodes * rng.randrange(1, 2000),
        num_prompt_tokens,
        num_prompt_tokens * rng.randrange(0, 4000) + num_prompt_tokens**2 / 2,
    )


def learn(model: StepTimeModel, steps: Iterable[tuple[StepWork, float]]) -> StepTimeModel:
    for work, seconds in steps:
        model.observe(work, seconds)
    return model


def worst_error(model: StepTimeModel, factor: float = 1.0) -> float:
    rng = random.Random(99)
    errors = []
    for _ in range(100):
        work = mixed_work(rng)
        predicted = model.predict(work)
        assert predicted is not None
        errors.append(abs(predicted / (factor * seconds_of(work)) - 1))
    return max(errors)


def test_nothing_is_known_before_the_first_step_nor_of_prompts_before_the_first_prompt() -> None:
    model = StepTimeModel()
    answers = StepWork(4, 400, 0, 0.0)
    assert (model.predict(answers), model.prompt_seconds(0, 16), model.prompt_tokens_within(1.0, 0)) == (None, None, 0)
    model.observe(answers, seconds_of(answers))
    assert model.predict(answers) == pytest.approx(seconds_of(answers), rel=0.01)
    assert (model.prompt_seconds(0, 16), model.prompt_tokens_within(1.0, 0)) == (None, 0)


def test_it_learns_what_steps_cost() -> None:
    rng = random.Random(1)
    works = [mixed_work(rng) for _ in range(300)]
    model = learn(StepTimeModel(), ((work, seconds_of(work) * rng.gauss(1, 0.02)) for work in works))
    assert worst_error(model) < 0.08
    assert model.prompt_seconds(1000, 100) == pytest.approx(0.1 + 0.105, rel=0.1)


def test_steps_that_were_disturbed_hardly_count() -> None:
    rng = random.Random(2)
    works = [mixed_work(rng) for _ in range(600)]
    disturbed = ((work, seconds_of(work) * rng.gauss(1, 0.02) * (20 if rng.random() < 0.05 else 1)) for work in works)
    assert worst_error(learn(StepTimeModel(), disturbed)) < 0.15


def test_a_machine_that_slows_down_is_learnt_anew() -> None:
    rng = random.Random(3)
    model = learn(StepTimeModel(), ((work, seconds_of(work)) for work in (mixed_work(rng) for _ in range(200))))
    learn(model, ((work, 2 * seconds_of(work)) for work in (mixed_work(rng) for _ in range(500))))
    assert worst_error(model, factor=2) < 0.05


def test_hours_of_answers_do_not_wash_out_what_a_prompt_costs() -> None:
    rng = random.Random(4)
    model = learn(StepTimeModel(), ((work, seconds_of(work)) for work in (mixed_work(rng) for _ in range(200))))
    answers = StepWork(8, 8000, 0, 0.0)
    learn(model, ((answers, seconds_of(answers) * rng.gauss(1, 0.05)) for _ in range(10_000)))
    assert model.prompt_seconds(0, 100) == pytest.approx(0.105, rel=0.15)


def test_what_costs_nothing_does_not_spoil_the_rest() -> None:
    rng = random.Random(7)
    works = [mixed_work(rng) for _ in range(60)]
    steps = ((work, (0.02 + 0.001 * work.num_prompt_tokens) * rng.gauss(1, 0.05)) for work in works)
    model = learn(StepTimeModel(), steps)
    for num_tokens in (16, 128, 512):
        predicted = model.predict(StepWork(0, 0, num_tokens, num_tokens**2 / 2))
        assert predicted == pytest.approx(0.02 + 0.001 * num_tokens, rel=0.1)


def test_costs_that_cannot_be_told_apart_add_up_to_what_was_measured() -> None:
    rng = random.Random(8)
    lengths = [rng.randrange(500, 513) for _ in range(40)]  # tokens and pairs grow alike
    works = [StepWork(0, 0, length, length**2 / 2) for length in lengths]
    model = learn(StepTimeModel(), ((work, seconds_of(work) * rng.gauss(1, 0.05)) for work in works))
    assert model.predict(works[0]) == pytest.approx(seconds_of(works[0]), rel=0.05)


def test_no_cost_is_ever_negative() -> None:
    rng = random.Random(5)
    model = learn(StepTimeModel(), ((mixed_work(rng), rng.uniform(0.001, 1.0)) for _ in range(100)))
    for work in (StepWork(0, 0, 16, 128.0), StepWork(1, 1, 0, 0.0), StepWork(32, 64000, 512, 1e6)):
        predicted = model.predict(work)
        assert predicted is not None and predicted >= 0


@settings(deadline=None)
@given(room=st.floats(0.0005, 2.0), first=st.integers(0, 8000), window=st.none() | st.integers(1, 4096))
def test_as_many_prompt_tokens_fit_as_the_model_says_they_cost(room: float, first: int, window: int | None) -> None:
    rng = random.Random(6)
    model = learn(StepTimeModel(), ((work, seconds_of(work)) for work in (mixed_work(rng) for _ in range(100))))
    num_tokens = model.prompt_tokens_within(room, first, window)
    cost, cost_of_one_more = (model.prompt_seconds(first, num_tokens + more, window) for more in (0, 1))
    assert cost is not None and cost_of_one_more is not None
    assert cost <= room * (1 + 1e-6)
    assert cost_of_one_more > room * (1 - 1e-6)
