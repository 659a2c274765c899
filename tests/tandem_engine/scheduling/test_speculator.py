"""Tests which drafts are tried: lengths by evidence, a cut-off by acceptance, rests, and when drafts are off."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tandem_engine.assembly import assemble
from tandem_engine.messages import AbortRequest
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.drafters import Agreement, Draft
from tandem_engine.scheduling.speculation.speculator import (
    REST_TOKENS,
    ROWS_PER_STEP,
    Acceptance,
    AcceptanceTable,
)
from tandem_engine.settings import EngineConfig
from tests.tandem_engine.scheduling.harness import EngineHarness


class Drafting:
    """Drafts the fake model's tokens, each right with probability `share_right`; counts its calls."""

    def __init__(self, share_right: float, num_matched: int = 16) -> None:
        self.share_right = share_right
        self.num_matched = num_matched
        self.num_calls = 0
        self._random = random.Random(0)

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        self.num_calls += 1
        first = request.num_tokens
        right = [self._random.random() < self.share_right for _ in range(max_tokens)]
        token_ids = [1000 + first + index if is_right else 7 for index, is_right in enumerate(right)]
        return Draft(token_ids, self.num_matched) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def harness_of(drafting: Drafting) -> EngineHarness:
    return EngineHarness(
        512,
        context_length=4096,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_num_waiting=64,
        max_draft_tokens=8,
        drafter=drafting,
    )


def answered(drafting: Drafting, num_requests: int = 1, num_tokens: int = 400) -> EngineHarness:
    harness = harness_of(drafting)
    for number in range(num_requests):
        harness.add(f"r{number}", [1, 2, 3], max_tokens=num_tokens)
    harness.run()
    return harness


def test_right_drafts_grow_from_the_short_to_the_full_length() -> None:
    harness = answered(Drafting(1.0))
    assert harness.counter("draft_tokens_accepted") == harness.counter("draft_tokens")
    assert harness.core.scheduler.num_steps == pytest.approx(400 / 9, abs=3)


def num_first_drafts(num_matched: int, agreement: Agreement) -> int:
    """Return how many tokens of a request's first draft are tried."""

    class Agreeing(Drafting):
        def draft(self, request: Request, max_tokens: int) -> Draft | None:
            draft = super().draft(request, max_tokens)
            return draft and draft._replace(agreements=[agreement] * len(draft.token_ids))

    harness = harness_of(Agreeing(1.0, num_matched))
    harness.add("a", [1, 2, 3], max_tokens=30)
    harness.step()
    harness.step()
    harness.core.handle(AbortRequest("a"))
    return int(harness.counter("draft_tokens"))


def test_a_longer_match_and_agreement_make_a_longer_draft() -> None:
    alone = [num_first_drafts(num_matched, Agreement.ALONE) for num_matched in (1, 4, 16)]
    assert alone == sorted(set(alone)) and alone[0] >= 1 and alone[-1] > 5
    by_agreement = [num_first_drafts(1, each) for each in (Agreement.NONE, Agreement.SOME, Agreement.ALL)]
    assert by_agreement == sorted(set(by_agreement)) and by_agreement[-1] == 8


def test_the_table_follows_what_was_accepted_of_a_class() -> None:
    table = AcceptanceTable()
    first, other = table.classes(Draft([1, 2], 1, [Agreement.ALONE, Agreement.NONE]), is_high=False)
    before = table.rate(other)
    for _ in range(300):
        table.observe(first, is_accepted=True)
    assert table.rate(first) > 0.95 and table.rate(other) == before
    for _ in range(300):
        table.observe(first, is_accepted=False)
    assert table.rate(first) < 0.1


def test_every_kind_of_evidence_is_a_class_of_its_own() -> None:
    table = AcceptanceTable()
    classes = [
        table.classes(Draft([1], num_matched, [agreement]), is_high=is_high)[0]
        for num_matched in (1, 2, 4, 8, 16)
        for agreement in Agreement
        for is_high in (False, True)
    ]
    assert sorted(classes) == list(range(40))


@pytest.mark.parametrize("share_right", [0.0, 0.03])
def test_drafts_that_are_wrong_are_hardly_tried_or_searched(share_right: float) -> None:
    drafting = Drafting(share_right)
    harness = answered(drafting)
    assert drafting.num_calls < 20
    assert harness.counter("draft_tokens") < 60


def test_with_many_answers_in_a_step_drafts_must_be_right_more_often() -> None:
    few, many = (answered(Drafting(0.75), number, 100) for number in (1, 40))
    shares = [harness.counter("draft_tokens") / harness.counter("tokens_generated") for harness in (few, many)]
    assert shares[0] > 0.6 > 0.3 > shares[1]


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    drafting = Drafting(0.0)
    harness = harness_of(drafting)
    harness.add("a", [1, 2, 3], max_tokens=1000)
    while harness.counter("tokens_generated") < 500:
        harness.step()
    drafting.share_right = 1.0
    steps_before = harness.core.scheduler.num_steps
    harness.run()
    assert harness.core.scheduler.num_steps - steps_before < 250


def test_requests_with_better_drafts_get_more_of_them() -> None:
    class ByRequest(Drafting):
        def draft(self, request: Request, max_tokens: int) -> Draft | None:
            self.share_right = 0.95 if request.request_id == "good" else 0.2
            return super().draft(request, max_tokens)

    harness = harness_of(ByRequest(0.0))
    harness.add("good", [1, 2, 3], max_tokens=900)
    harness.add("bad", [1, 2, 3], max_tokens=900)
    for _ in range(60):
        harness.step()
    good, bad = (harness.core.scheduler._requests[name] for name in ("good", "bad"))
    assert good.num_draft_tokens > 4 * bad.num_draft_tokens
    for name in ("good", "bad"):
        harness.core.handle(AbortRequest(name))
    harness.assert_nothing_is_left()


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    harness = harness_of(Drafting(0.5))
    harness.add("a", [1, 2, 3], max_tokens=20)
    harness.add("b", [1, 2, 3], max_tokens=20)
    harness.step()
    harness.step()
    harness.core.handle(AbortRequest("b"))
    harness.run()
    speculator = harness.core.scheduler.speculator
    assert not speculator._of_texts and not speculator._of_model and not speculator._tried


def test_the_average_follows_the_latest_drafts_and_ends_in_a_rest() -> None:
    acceptance, cutoff = Acceptance(), 1 / (1 + ROWS_PER_STEP)
    assert acceptance.rate == 0.5
    for _ in range(20):
        acceptance.observe(8, 8, 100, cutoff)
    assert acceptance.rate > 0.95 and acceptance.rests_until == 0
    num_drafts = 0
    while not acceptance.rests_until:
        acceptance.observe(8, 0, 200, cutoff)
        num_drafts += 1
    assert acceptance.rests_until == 200 + REST_TOKENS
    assert 10 < num_drafts < 20


def test_searches_without_a_result_end_in_a_rest_too() -> None:
    class Silent(Drafting):
        def draft(self, request: Request, max_tokens: int) -> Draft | None:
            self.num_calls += 1
            return None

    drafting = Silent(0.0)
    answered(drafting)
    assert drafting.num_calls < 40


@pytest.mark.parametrize("value", [0, 33])
def test_settings_refuse_more_guesses_than_can_be_and_fewer_than_one(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_draft_tokens is {value}, must be from 1 to 32"):
        EngineConfig("model", max_draft_tokens=value)


def test_nothing_is_guessed_where_it_is_switched_off(make_engine: Callable[..., Any]) -> None:
    assert make_engine("llama", speculation="off").core.scheduler.config.max_draft_tokens == 0
    assert make_engine("llama", max_draft_tokens=5).core.scheduler.config.max_draft_tokens == 5


def test_nothing_is_guessed_where_a_row_depends_on_its_neighbours(make_checkpoint: Callable[[str], Path]) -> None:
    """The transformers route in bfloat16 is batch-dependent."""
    for kind, dtype in (("llama", "bfloat16"), ("mixtral", "bfloat16")):
        config = EngineConfig(str(make_checkpoint(kind)), device="cpu", dtype=dtype, route="transformers")  # type: ignore[arg-type]
        engine = assemble(replace(config, num_kv_blocks=8, num_threads=1), lambda stage, fraction: None)
        assert engine.core.scheduler.config.max_draft_tokens == 0
