"""Tests when a draft model is called, for which requests, and what a failing one does."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import pytest

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.draft_model import MAX_CATCH_UP_TOKENS, NUM_DRAFT_TOKENS
from tandem_engine.scheduling.speculation.drafters import Draft
from tests.tandem_engine.scheduling.harness import EngineHarness


class FakeDraftModel:
    """Proposes the fake model's tokens, each right with probability `share_right`."""

    def __init__(self, share_right: float) -> None:
        self.share_right = share_right
        self.num_calls = 0
        self.num_caught_up = 0
        self.breaks = False
        self._num_held: dict[Request, int] = {}
        self._random = random.Random(0)

    def num_missing(self, request: Request) -> int | None:
        return request.num_tokens - self._num_held.get(request, 0)

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        self.num_calls += 1
        if self.breaks:
            raise MemoryError("no memory")
        num_left = MAX_CATCH_UP_TOKENS
        proposed = {}
        for request, num_wanted in wanted.items():
            assert request.num_tokens + num_wanted <= 4 * len(request.block_table), "tokens without a slot"
            num_tokens = min(num_left, request.num_tokens - self._num_held.get(request, 0))
            num_left -= num_tokens
            self.num_caught_up += num_tokens
            self._num_held[request] = self._num_held.get(request, 0) + num_tokens
            if self._num_held[request] == request.num_tokens:
                first = 1000 + request.num_tokens
                right = [self._random.random() < self.share_right for _ in range(num_wanted)]
                proposed[request] = [first + i if is_right else 7 for i, is_right in enumerate(right)]
        return proposed

    def forget(self, request: Request) -> None:
        self._num_held.pop(request, None)


class Text:
    """Drafts nothing, or four tokens that are right."""

    def __init__(self, is_right: bool) -> None:
        self.is_right = is_right

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        num_tokens = min(4, max_tokens) if self.is_right else 0
        token_ids = [1000 + request.num_tokens + index for index in range(num_tokens)]
        return Draft(token_ids, 16) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def harness_of(*, is_text_right: bool = False, num_blocks: int = 1024) -> EngineHarness:
    return EngineHarness(
        num_blocks,
        context_length=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        max_num_waiting=64,
        max_draft_tokens=8,
        drafter=Text(is_text_right),
    )


def with_model(harness: EngineHarness, share_right: float) -> FakeDraftModel:
    model = FakeDraftModel(share_right)
    harness.core.scheduler.speculator.use_model(model)
    return model


def answer(harness: EngineHarness, num_requests: int = 1, num_tokens: int = 400) -> None:
    for number in range(num_requests):
        harness.add(f"r{number}", [1, 2, 3], max_tokens=num_tokens // num_requests)
    harness.run()
    harness.assert_nothing_is_left()


def test_proposals_have_their_fixed_length_and_all_of_them_count() -> None:
    harness = harness_of()
    with_model(harness, 1.0)
    answer(harness)
    assert harness.counter("draft_tokens_accepted") == harness.counter("draft_tokens")
    assert harness.core.scheduler.num_steps == pytest.approx(400 / (1 + NUM_DRAFT_TOKENS), abs=2)


@pytest.mark.parametrize("share_right", [0.0, 0.2])
def test_a_model_that_is_mostly_wrong_is_hardly_called(share_right: float) -> None:
    harness = harness_of()
    model = with_model(harness, share_right)
    answer(harness)
    assert 1 <= model.num_calls < 25


def test_where_the_text_is_right_the_model_is_not_called() -> None:
    harness = harness_of(is_text_right=True)
    model = with_model(harness, 1.0)
    answer(harness)
    assert model.num_calls < 3, "once the text has proved right"
    assert harness.counter("draft_tokens_accepted") > 250


def test_a_model_that_comes_to_be_right_is_noticed() -> None:
    harness = harness_of()
    model = with_model(harness, 0.0)
    num_steps = []
    for number in range(20):
        model.share_right = float(number >= 5)
        before = harness.core.scheduler.num_steps
        harness.add(f"r{number}", [1, 2, 3], max_tokens=60)
        harness.run()
        num_steps.append(harness.core.scheduler.num_steps - before)
    assert num_steps[4] == 60
    assert num_steps[-1] < 20


def test_a_long_prompt_is_caught_up_with_over_several_steps() -> None:
    harness = harness_of()
    model = with_model(harness, 0.9)
    harness.add("long", list(range(900)), max_tokens=300)
    harness.step()
    for number in range(1, 4):
        harness.step()
        assert model.num_caught_up == number * MAX_CATCH_UP_TOKENS
        assert harness.counter("draft_tokens") == 0
    harness.run()
    assert model.num_caught_up > 900
    assert harness.counter("draft_tokens_accepted") > 100


def test_proposals_take_no_block_that_others_may_need() -> None:
    harness = harness_of(num_blocks=14)
    with_model(harness, 0.9)
    for name in "ab":
        harness.add(name, [1, 2, 3], max_tokens=40)
    harness.run()
    assert harness.counter("preemptions") > 0
    assert harness.counter("draft_tokens_accepted") > 0
    harness.assert_nothing_is_left()


def test_one_that_breaks_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    harness = harness_of()
    model = with_model(harness, 1.0)
    model.breaks = True
    with caplog.at_level(logging.ERROR):
        answer(harness)
    assert model.num_calls == 1
    assert caplog.messages == ["the draft model is switched off: MemoryError: no memory"]
