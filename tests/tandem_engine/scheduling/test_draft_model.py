"""Is a draft model asked where that pays, and only there?"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import pytest

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.draft_model import MAX_CATCH_UP_TOKENS
from tandem_engine.scheduling.speculation.drafters import Guess
from tandem_engine.scheduling.speculation.ngrams import FIRM
from tandem_engine.scheduling.speculation.proposal_cost import ProposalCost
from tandem_engine.scheduling.step_time import StepWork
from tests.tandem_engine.scheduling.harness import World


class FakeDraftModel:
    """Proposes the fake model's tokens, each wrong by so much chance, and lets time pass."""

    def __init__(self, world: World, share_right: float, round_seconds: float, token_seconds: float = 0.0) -> None:
        self.world = world
        self.share_right = share_right
        self.round_seconds = round_seconds
        self.token_seconds = token_seconds
        self.num_asked = 0
        self.num_caught_up = 0
        self.breaks = False
        self._num_held: dict[Request, int] = {}
        self._random = random.Random(0)

    def num_missing(self, request: Request) -> int | None:
        return request.num_tokens - self._num_held.get(request, 0)

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        self.num_asked += 1
        if self.breaks:
            raise MemoryError("no memory")
        num_left = MAX_CATCH_UP_TOKENS
        proposed = {}
        for request, num_wanted in wanted.items():
            assert request.num_tokens + num_wanted <= 4 * len(request.block_table), "tokens without a slot"
            num_tokens = min(num_left, request.num_tokens - self._num_held.get(request, 0))
            num_left -= num_tokens
            self.num_caught_up += num_tokens
            self.world.runner.seconds += self.token_seconds * num_tokens
            self._num_held[request] = self._num_held.get(request, 0) + num_tokens
            if self._num_held[request] == request.num_tokens:
                first = 1000 + request.num_tokens
                right = [self._random.random() < self.share_right for _ in range(num_wanted)]
                proposed[request] = [first + i if is_right else 7 for i, is_right in enumerate(right)]
        self.world.runner.seconds += self.round_seconds * max(map(len, proposed.values()), default=0)
        return proposed

    def forget(self, request: Request) -> None:
        self._num_held.pop(request, None)


class Text:
    """Guesses nothing, or four tokens that are right."""

    def __init__(self, is_firm: bool) -> None:
        self.is_firm = is_firm

    def guess(self, request: Request, max_tokens: int) -> Guess | None:
        num_tokens = min(4, max_tokens) if self.is_firm else 0
        token_ids = [1000 + request.num_tokens + index for index in range(num_tokens)]
        return Guess(token_ids, 16, [FIRM] * num_tokens) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def world_of(seconds_each: float = 0.02, *, is_firm: bool = False, num_blocks: int = 1024) -> World:
    return World(
        num_blocks,
        context_length=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        max_num_waiting=64,
        step_seconds=lambda work: (
            1 + seconds_each * (work.num_decodes + work.num_draft_tokens) + 0.001 * work.num_prompt_tokens
        ),
        max_draft_tokens=8,
        drafter=Text(is_firm),
    )


def with_model(world: World, share_right: float, round_seconds: float, token_seconds: float = 0.0) -> FakeDraftModel:
    model = FakeDraftModel(world, share_right, round_seconds, token_seconds)
    world.core.scheduler.speculator.use_model(model)
    return model


def tokens_per_second(world: World, num_requests: int = 1, num_tokens: int = 400) -> float:
    for number in range(num_requests):
        world.add(f"r{number}", [1, 2, 3], max_tokens=num_tokens // num_requests)
    world.run()
    world.assert_nothing_is_left()
    return world.counter("tokens_generated") / world.runner.seconds


def test_proposals_that_are_right_are_asked_for_as_many_as_pay() -> None:
    world = world_of(0.02)
    with_model(world, 1.0, 0.05)
    assert tokens_per_second(world) > 0.9 * 9 / (1.02 + 8 * 0.07)
    assert world.counter("draft_tokens_accepted") == world.counter("draft_tokens")


@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("round_seconds", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("num_requests", [1, 6])
def test_it_never_loses_more_than_three_percent(share_right: float, round_seconds: float, num_requests: int) -> None:
    world = world_of()
    with_model(world, share_right, round_seconds, 0.002)
    plain = num_requests / (1 + 0.02 * num_requests)
    assert tokens_per_second(world, num_requests, 300 * num_requests) > 0.97 * plain


@pytest.mark.parametrize(("share_right", "round_seconds"), [(0.0, 0.1), (1.0, 5.0)])
def test_where_it_does_not_pay_it_is_hardly_asked(share_right: float, round_seconds: float) -> None:
    world = world_of()
    model = with_model(world, share_right, round_seconds)
    tokens_per_second(world, num_tokens=400)
    assert 1 <= model.num_asked < 80


def test_where_the_text_is_firm_the_model_is_not_asked() -> None:
    world = world_of(is_firm=True)
    model = with_model(world, 1.0, 0.05)
    tokens_per_second(world)
    assert model.num_asked < 10, "once the text has proved firm"
    assert world.counter("draft_tokens_accepted") > 250


def test_what_it_takes_is_no_part_of_what_steps_are_thought_to_take() -> None:
    world = world_of(0.02)
    model = with_model(world, 0.9, 0.4)
    tokens_per_second(world)
    assert model.num_asked > 20
    assert world.core.scheduler.pacer.model.draft_seconds() == pytest.approx(0.02, rel=0.1)


def test_steps_whose_beginnings_were_slow_are_not_thought_slow_for_ever() -> None:
    """A copy of the model: always right, and as slow. Asked from the start, it would leave no step that says so."""
    steps: list[StepWork] = []

    def seconds_of(work: StepWork) -> float:
        steps.append(work)
        return (5.0 if len(steps) < 4 else 1.0) + 0.15 * work.num_draft_tokens

    world = World(128, context_length=512, step_seconds=seconds_of, max_draft_tokens=8, drafter=Text(is_firm=False))
    model = with_model(world, 1.0, 0.9)
    tokens_per_second(world, num_tokens=400)
    assert model.num_asked < 40


def test_a_model_that_comes_to_be_right_is_noticed() -> None:
    world = world_of()
    model = with_model(world, 0.0, 0.1)
    num_steps = []
    for number in range(20):
        model.share_right = float(number >= 5)
        before = world.core.scheduler.num_steps
        world.add(f"r{number}", [1, 2, 3], max_tokens=60)
        world.run()
        num_steps.append(world.core.scheduler.num_steps - before)
    assert num_steps[4] == 60
    assert num_steps[-1] < 20


def test_a_long_prompt_is_caught_up_with_for_a_long_answer_and_not_for_a_short_one() -> None:
    world = world_of()
    model = with_model(world, 0.9, 0.05, 0.01)
    tokens_per_second(world)
    caught_up = []
    for name, max_tokens in (("short", 5), ("long", 300)):
        before = model.num_caught_up
        world.add(name, list(range(900)), max_tokens=max_tokens)
        world.run()
        caught_up.append(model.num_caught_up - before)
    assert caught_up[0] <= MAX_CATCH_UP_TOKENS, "no more than a probe"
    assert caught_up[1] > 900


def test_proposals_take_no_block_that_others_may_need() -> None:
    world = world_of(num_blocks=14)
    with_model(world, 0.9, 0.05)
    for name in "ab":
        world.add(name, [1, 2, 3], max_tokens=40)
    world.run()
    assert world.counter("preemptions") > 0
    assert world.counter("draft_tokens_accepted") > 0
    world.assert_nothing_is_left()


def test_one_that_breaks_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    world = world_of()
    model = with_model(world, 1.0, 0.05)
    model.breaks = True
    with caplog.at_level(logging.ERROR):
        tokens_per_second(world)
    assert model.num_asked == 1
    assert caplog.messages == ["the draft model is switched off: MemoryError: no memory"]


def test_rounds_and_tokens_to_catch_up_with_are_told_apart() -> None:
    cost = ProposalCost()
    cost.observe(1, 2, 100, 9.0)  # the first call is slow
    assert cost.is_known
    for _ in range(4):
        cost.observe(1, 2, 2, 0.2)
    assert cost.round_seconds(1) == pytest.approx(0.1)
    assert cost.round_seconds(5) == cost.round_seconds(1), "as long as nothing nearer was measured"
    cost.observe(1, 1, 202, 0.5)  # of which the first call's rough guess is no part any more
    assert cost.catch_up_seconds(100) == pytest.approx(0.2)
    assert cost.seconds(1, 3, 102) == pytest.approx(0.5)
