"""Tests that drafts change only the number of steps, whether they are right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tandem_engine.messages import AbortRequest, StartDecode
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.drafters import Draft
from tests.tandem_engine.scheduling.harness import ROOT, STOP, EngineHarness, kv_of, slab, tokens_of


class Script:
    """Drafts the fake model's tokens, wrong at some positions."""

    def __init__(self, num_tokens: int = 3, wrong: Sequence[int] = (), stops: Sequence[int] = ()) -> None:
        self.num_tokens = num_tokens
        self.wrong = wrong
        self.stops = stops

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        first = request.num_tokens
        positions = range(first, first + min(self.num_tokens, max_tokens))
        token_ids = [7 if each in self.wrong else STOP if each in self.stops else 1000 + each for each in positions]
        return Draft(token_ids, 16) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


def drafting(script: Script, num_blocks: int = 16, **settings: Any) -> EngineHarness:
    return EngineHarness(num_blocks, drafter=script, max_draft_tokens=8, **settings)


def test_right_guesses_come_together_with_the_token_behind_them() -> None:
    harness = drafting(Script(num_tokens=3))
    harness.add("a", [1, 2, 3], max_tokens=10)
    harness.step()
    outputs = harness.run()
    assert [output.token_ids for output in outputs] == [[1004, 1005, 1006, 1007], [1008, 1009, 1010, 1011], [1012]]
    assert [output.position for output in outputs] == [4, 8, 12]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated_tokens) == ("length", 10)
    assert (outputs[-1].num_draft_tokens, outputs[-1].num_accepted_tokens) == (6, 6)
    assert (harness.counter("draft_tokens"), harness.counter("draft_tokens_accepted")) == (6, 6)
    assert harness.counter("tokens_generated") == 10
    harness.assert_nothing_is_left()


def test_behind_a_wrong_guess_nothing_counts() -> None:
    harness = drafting(Script(num_tokens=3, wrong=[6]))
    harness.add("a", [1, 2, 3], max_tokens=6)
    outputs = harness.run()
    assert [output.token_ids for output in outputs] == [[1003], [1004, 1005, 1006], [1007, 1008]]
    assert (outputs[-1].num_draft_tokens, outputs[-1].num_accepted_tokens) == (4, 3), "three, then the one with room"
    harness.assert_nothing_is_left()


def test_a_stop_token_among_the_guesses_ends_the_answer_there() -> None:
    harness = drafting(Script(num_tokens=6, stops=[6]))
    harness.runner.stop_positions = {6}
    harness.add("a", [1, 2, 3], max_tokens=20)
    outputs = harness.run()
    assert tokens_of(outputs, "a") == [1003, 1004, 1005, STOP]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].num_draft_tokens == 2, "what follows a stop token is not worth computing"
    harness.assert_nothing_is_left()


def test_a_stop_token_drawn_where_another_was_guessed_ends_the_answer() -> None:
    harness = drafting(Script(num_tokens=6))
    harness.runner.stop_positions = {5}
    harness.add("a", [1, 2, 3], max_tokens=20)
    assert tokens_of(harness.run(), "a") == [1003, 1004, STOP]
    harness.assert_nothing_is_left()


@pytest.mark.parametrize(("max_tokens", "context_length"), [(4, 64), (20, 6)])
def test_no_guess_goes_beyond_the_answers_longest_end(max_tokens: int, context_length: int) -> None:
    harness = drafting(Script(num_tokens=8), context_length=context_length)
    harness.add("a", [1, 2, 3], max_tokens=max_tokens)
    outputs = harness.run()
    assert tokens_of(outputs, "a") == [1003, 1004, 1005, 1006]
    assert (outputs[-1].finish_reason, outputs[-1].num_draft_tokens) == ("length", 2)
    harness.assert_nothing_is_left()


def test_blocks_filled_by_right_guesses_are_found_by_the_next_request() -> None:
    harness = drafting(Script(num_tokens=3, wrong=[10]))
    harness.add("a", [1, 2, 3], max_tokens=9, root=ROOT)
    filled = [each for _ in range(3) for each in harness.step().filled]
    assert [len(each.hashes) for each in filled] == [1, 1], "the draft of token 10 was wrong"
    harness.run()
    answer = [1000 + position for position in range(3, 12)]
    harness.add("b", [1, 2, 3, *answer, 5], max_tokens=1, root=ROOT)
    (output,) = harness.run()
    assert output.num_cached_tokens == 8
    harness.assert_nothing_is_left()


def test_guesses_never_take_a_block_that_others_may_need() -> None:
    harness = drafting(Script(num_tokens=8), num_blocks=4)
    harness.add("a", [1, 2, 3], max_tokens=12)
    harness.add("b", [1, 2, 3], max_tokens=12)
    harness.step()
    harness.step()
    assert [len(run) for run in harness.runner.steps[-1:]] == [2]
    assert harness.pool.num_available == 2, "one block for each of the two is left"
    outputs = harness.run()
    assert tokens_of(outputs, "a")[-1] == tokens_of(outputs, "b")[-1] == 1014
    harness.assert_nothing_is_left()


def test_a_preempted_request_goes_on_as_if_nothing_had_been_guessed() -> None:
    harness = drafting(Script(num_tokens=3, wrong=[9, 13]), num_blocks=6)
    harness.add("a", [1, 2, 3], max_tokens=18, root=ROOT)
    harness.add("b", [4, 5, 6], max_tokens=18, root=ROOT)
    outputs = harness.run()
    for name in "ab":
        assert tokens_of(outputs, name) == [1000 + position for position in range(3, 21)]
    assert harness.counter("preemptions") > 0
    assert harness.counter("draft_tokens_accepted") > 0
    harness.assert_nothing_is_left()


def test_a_handed_over_answer_is_guessed_from_its_first_step_on() -> None:
    harness = drafting(Script(num_tokens=3))
    harness.add("warm", [9, 9, 9], max_tokens=2)
    harness.run()
    prompt = [1, 2, 3, 4, 5]
    harness.runner.remote = {20: kv_of(prompt)[:4], 21: [*kv_of(prompt)[4:], 0, 0, 0]}
    harness.add("d", prompt, mode="decode", max_tokens=6)
    harness.core.handle(slab("d", 0, [20, 21]))
    harness.core.handle(StartDecode("d", [1005]))
    outputs = harness.run()
    assert [output.token_ids for output in outputs] == [[1006, 1007, 1008, 1009], [1010]]
    assert harness.counter("reprefill_tokens") == 0
    harness.assert_nothing_is_left()


def test_neither_prompts_nor_prefills_are_guessed() -> None:
    harness = drafting(Script(num_tokens=3))
    harness.add("warm", [9, 9, 9], max_tokens=2)
    harness.run()
    num_before = harness.counter("draft_tokens")
    harness.add("p", [1, 2, 3, 4, 5], mode="prefill", choice_seeds=[1, 2], prefix={0: 20})
    harness.runner.remote = {20: kv_of([1, 2, 3, 4])}
    harness.step()
    assert harness.counter("draft_tokens") == num_before
    harness.core.handle(AbortRequest("p"))
    harness.assert_nothing_is_left()


def test_prompts_go_before_guesses_in_the_budget() -> None:
    harness = drafting(Script(num_tokens=8), max_num_batched_tokens=9, num_blocks=32)
    harness.add("a", [1, 2, 3], max_tokens=30)
    harness.step()
    harness.step()
    harness.add("b", list(range(7)), max_tokens=1)
    before = harness.counter("draft_tokens")
    harness.step()
    assert harness.last_runs()[1] == ("b", 0, 7)
    assert harness.counter("draft_tokens") - before == 1, "9 less one known token and 7 of the prompt"
    harness.core.handle(AbortRequest("a"))
    harness.assert_nothing_is_left()


def test_what_lies_behind_a_window_is_dropped_by_what_counts_alone() -> None:
    harness = drafting(Script(num_tokens=6, wrong=[9, 14, 15]), window=5)
    harness.add("a", [1, 2, 3], max_tokens=20)
    assert tokens_of(harness.run(), "a") == [1000 + position for position in range(3, 23)]
    harness.assert_nothing_is_left()
