"""Are guesses tried where they pay, and only there?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem_engine.assembly import assemble
from tandem_engine.messages import AbortRequest
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.acceptance import MOST_CHANCE, Acceptance, Rates
from tandem_engine.scheduling.speculation.drafters import Guess
from tandem_engine.scheduling.speculation.ngrams import CHANGED, FIRM, UNSEEN
from tandem_engine.scheduling.speculation.rest import Gain, Rest
from tandem_engine.scheduling.step_time import StepTimeModel, StepWork
from tandem_engine.settings import EngineConfig
from tests.tandem_engine.scheduling.harness import World


class Guesser:
    """Guesses the fake model's tokens, each wrong by so much chance; counts how often it is asked."""

    def __init__(self, share_right: float) -> None:
        self.share_right = share_right
        self.num_asked = 0
        self._random = random.Random(0)

    def guess(self, request: Request, max_tokens: int) -> Guess | None:
        self.num_asked += 1
        first = request.num_tokens
        right = [self._random.random() < self.share_right for _ in range(max_tokens)]
        token_ids = [1000 + first + index if is_right else 7 for index, is_right in enumerate(right)]
        return Guess(token_ids, 4, [UNSEEN] * max_tokens) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def world_of(guesser: Guesser, seconds_each: float, num_blocks: int = 512) -> World:
    """A machine whose step takes a second for its weights and so much for each row."""
    return World(
        num_blocks,
        context_length=4096,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_num_waiting=64,
        step_seconds=lambda work: 1 + seconds_each * (work.num_decodes + work.num_draft_tokens),
        max_draft_tokens=8,
        drafter=guesser,
    )


def tokens_per_second(guesser: Guesser, seconds_each: float, num_requests: int = 1) -> tuple[float, World]:
    world = world_of(guesser, seconds_each)
    for number in range(num_requests):
        world.add(f"r{number}", [1, 2, 3], max_tokens=400 // num_requests)
    world.run()
    return world.counter("tokens_generated") / world.runner.seconds, world


def test_guesses_that_are_right_are_tried_as_many_as_pay() -> None:
    per_second, world = tokens_per_second(Guesser(1.0), 0.05)
    assert per_second > 0.95 * 9 / 1.45  # eight of eight: 9 tokens in 1 + 9 * 0.05 seconds
    assert world.counter("draft_tokens_accepted") == world.counter("draft_tokens")


@pytest.mark.parametrize("share_right", [0.0, 0.03])
def test_guesses_that_are_wrong_cost_a_percent_or_two_and_are_hardly_looked_for(share_right: float) -> None:
    guesser = Guesser(share_right)
    per_second, world = tokens_per_second(guesser, 0.1)
    assert per_second > 0.98 / 1.1
    assert guesser.num_asked < 100
    assert 3 <= world.counter("draft_tokens") < 40


@pytest.mark.parametrize("share_right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seconds_each", [0.02, 0.1, 0.3, 1.0])
def test_it_never_loses_more_than_three_percent(share_right: float, seconds_each: float) -> None:
    per_second, _ = tokens_per_second(Guesser(share_right), seconds_each)
    assert per_second > 0.97 / (1 + seconds_each)


def test_with_many_answers_in_a_step_rows_are_too_dear() -> None:
    guesser = Guesser(0.9)
    plain = 40 / (1 + 40 * 0.2)
    per_second, world = tokens_per_second(guesser, 0.2, num_requests=40)
    assert per_second > 0.97 * plain
    assert world.counter("draft_tokens") < 0.2 * world.counter("tokens_generated")


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    guesser = Guesser(0.0)
    world = world_of(guesser, 0.1)
    world.add("a", [1, 2, 3], max_tokens=1000)
    while world.counter("tokens_generated") < 500:
        world.step()
    guesser.share_right = 1.0
    steps_before = world.core.scheduler.num_steps
    world.run()
    assert world.core.scheduler.num_steps - steps_before < 250


def test_a_new_request_profits_from_what_others_have_shown() -> None:
    guesser = Guesser(0.0)
    world = world_of(guesser, 0.1)
    asked = []
    for number in range(8):
        before = guesser.num_asked
        world.add(f"r{number}", [1, 2, 3], max_tokens=60)
        world.run()
        asked.append(guesser.num_asked - before)
    assert asked[-1] <= 8 < asked[0]


def test_what_guesses_cost_is_measured_again_though_it_seemed_too_much() -> None:
    world = world_of(Guesser(1.0), 5.0)
    world.add("a", [1, 2, 3], max_tokens=100)
    world.run()
    world.runner.step_seconds = lambda work: 1 + 0.05 * (work.num_decodes + work.num_draft_tokens)
    before = world.counter("draft_tokens")
    world.add("b", [1, 2, 3], max_tokens=2000)
    world.run()
    assert world.counter("draft_tokens") - before > 1000


def test_requests_with_better_guesses_get_more_of_them() -> None:
    class ByRequest(Guesser):
        def guess(self, request: Request, max_tokens: int) -> Guess | None:
            self.share_right = 0.95 if request.request_id == "good" else 0.2
            return super().guess(request, max_tokens)

    world = world_of(ByRequest(0.0), 0.1)
    world.add("good", [1, 2, 3], max_tokens=900)
    world.add("bad", [1, 2, 3], max_tokens=900)
    for _ in range(60):
        world.step()
    good, bad = (world.core.scheduler._requests[name] for name in ("good", "bad"))
    assert good.num_draft_tokens > 4 * bad.num_draft_tokens
    for name in ("good", "bad"):
        world.core.handle(AbortRequest(name))
    world.assert_nothing_is_left()


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    world = world_of(Guesser(0.5), 0.1)
    world.add("a", [1, 2, 3], max_tokens=20)
    world.add("b", [1, 2, 3], max_tokens=20)
    world.step()
    world.step()
    world.core.handle(AbortRequest("b"))
    world.run()
    assert not world.core.scheduler.speculator._standings
    assert not world.core.scheduler.speculator._tried


def test_chances_fall_along_a_guess_and_follow_what_was_observed() -> None:
    rates = Rates()
    acceptance, guess = Acceptance(rates), Guess([1, 2, 3, 4], 1, [UNSEEN] * 4)
    before = acceptance.chances(guess, 0.0)
    assert before == sorted(before, reverse=True)
    assert len(acceptance.chances(guess, before[1])) == 3, "the first that is below ends the list"
    for _ in range(100):
        acceptance.observe(guess, 4, 2)
    after = acceptance.chances(guess, 0.0)
    assert after[1] > 0.8 > 0.2 > after[2]
    assert Acceptance(rates).chances(guess, 0.0)[2] < before[2], "others' guesses of the kind are trusted less, too"
    changed, firm = (acceptance.chances(guess._replace(firmness=[each]), 0.0)[0] for each in (CHANGED, FIRM))
    assert changed < firm <= MOST_CHANCE


@pytest.mark.parametrize(
    ("of_all", "expected"),
    [(0.08, [0, 8, 0, 16, 0, 32, 0, 64, 0, 64, 0, 64]), (0.0, [16, 0, 32, 0, 64, 0, 64, 0, 64, 0, 64, 0])],
    ids=["where others gained", "where others did not"],
)
def test_pauses_grow_to_their_longest_and_end_with_a_right_guess(of_all: float, expected: list[int]) -> None:
    gain = Gain()
    gain.mean = of_all
    rest, num_tokens, pauses = Rest(gain), 100, []
    for _ in range(12):
        assert rest.is_over(num_tokens)
        rest.looked(num_tokens, 0)
        pause = next(length for length in range(100) if rest.is_over(num_tokens + length))
        pauses.append(pause)
        num_tokens += pause
    assert pauses == expected
    while not rest.num_probes:
        rest.looked(num_tokens, 0)
    rest.looked(num_tokens, 1)
    assert rest.num_probes == 0


def test_what_drafts_cost_is_learnt_and_not_washed_out_by_steps_without() -> None:
    model = StepTimeModel()
    assert model.draft_seconds() is None
    rng = random.Random(1)
    for _ in range(60):
        num_drafts = rng.randrange(0, 9)
        model.observe(StepWork(2, 200, 0, 0.0, num_drafts), (0.02 + 0.001 * num_drafts) * rng.gauss(1, 0.02))
    for _ in range(5000):
        model.observe(StepWork(2, 200), 0.02 * rng.gauss(1, 0.02))
    assert model.draft_seconds() == pytest.approx(0.001, rel=0.2)
    assert model.predict(StepWork(2, 200)) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("value", [0, 33])
def test_settings_refuse_more_guesses_than_can_be_and_fewer_than_one(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_draft_tokens is {value}, must be from 1 to 32"):
        EngineConfig("model", max_draft_tokens=value)


def test_nothing_is_guessed_where_it_is_switched_off(make_engine: Callable[..., Any]) -> None:
    assert make_engine("llama", speculation="off").core.scheduler.config.max_draft_tokens == 0
    assert make_engine("llama", max_draft_tokens=5).core.scheduler.config.max_draft_tokens == 5


def test_nothing_is_guessed_where_a_row_depends_on_its_neighbours(make_checkpoint: Callable[[str], Path]) -> None:
    """In bfloat16 the compatibility route's linear layers and experts are torch's."""
    for kind, dtype in (("llama", "bfloat16"), ("mixtral", "bfloat16")):
        config = EngineConfig(str(make_checkpoint(kind)), device="cpu", dtype=dtype, route="transformers")  # type: ignore[arg-type]
        engine = assemble(replace(config, num_kv_blocks=8, num_threads=1), lambda stage, fraction: None)
        assert engine.core.scheduler.config.max_draft_tokens == 0
