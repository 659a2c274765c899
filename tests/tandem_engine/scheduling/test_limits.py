"""Tests where a request ends, and which requests are refused, with which numbers."""

from __future__ import annotations

import pytest

from tandem_engine.messages import AddRequest, EngineEvent, Refused, Reserved
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tests.tandem_engine.scheduling.harness import ROOT, STOP, EngineHarness, tokens_of


def refusal(events: list[EngineEvent]) -> tuple[str, str]:
    assert len(events) == 1
    assert isinstance(events[0], Refused)
    return events[0].reason, events[0].message


def test_a_prompt_of_exactly_the_context_length_yields_exactly_one_token() -> None:
    harness = EngineHarness(num_blocks=3, context_length=12)
    assert harness.add("full", list(range(12)), max_tokens=50) == [Reserved("full", 0)]
    outputs = harness.run()
    assert [(o.token_ids, o.position, o.finish_reason) for o in outputs] == [([1012], 12, "length")]
    harness.assert_nothing_is_left()


def test_one_token_less_yields_two() -> None:
    harness = EngineHarness(num_blocks=3, context_length=12)
    harness.add("almost", list(range(11)), max_tokens=50)
    outputs = harness.run()
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([1011], None), ([1012], "length")]
    harness.assert_nothing_is_left()


def test_one_token_more_is_refused_with_both_numbers() -> None:
    harness = EngineHarness(num_blocks=9, context_length=12)
    reason, message = refusal(harness.add("long", list(range(13))))
    assert reason == "context"
    assert message == "prompt has 13 tokens, this model takes 12; shorten it or raise --max-model-len"
    harness.assert_nothing_is_left()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_answer_has_exactly_max_tokens(max_tokens: int) -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3], max_tokens=max_tokens)
    outputs = harness.run()
    assert tokens_of(outputs, "a") == [1003 + i for i in range(max_tokens)]
    assert [output.finish_reason for output in outputs] == [None] * (max_tokens - 1) + ["length"]
    harness.assert_nothing_is_left()


def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    harness = EngineHarness()
    harness.runner.stop_positions = {4}
    harness.add("a", [1, 2, 3], max_tokens=2)
    outputs = harness.run()
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([1003], None), ([STOP], "stop")]
    harness.assert_nothing_is_left()


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    harness = EngineHarness()
    harness.add("a", [1, STOP, STOP], max_tokens=2)
    assert tokens_of(harness.run(), "a") == [1003, 1004]
    harness.assert_nothing_is_left()


def test_tokens_generated_before_a_migration_count_towards_max_tokens() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2, 3, 1003, 1004], num_prompt_tokens=3, max_tokens=4)
    outputs = harness.run()
    assert tokens_of(outputs, "a") == [1005, 1006]
    assert outputs[-1].num_generated_tokens == 2
    assert outputs[-1].num_computed_tokens == 3
    reason, message = refusal(harness.add("b", [1, 2, 3, 1003, 1004], num_prompt_tokens=3, max_tokens=2))
    assert (reason, message) == ("invalid", "2 answer tokens were given already, max_tokens is 2")
    harness.assert_nothing_is_left()


def test_what_fits_the_pool_exactly_runs_and_one_token_more_is_refused_at_once() -> None:
    harness = EngineHarness(num_blocks=2)
    assert harness.add("fits", [1, 2, 3, 4, 5], max_tokens=4) == [Reserved("fits", 0)]
    assert len(tokens_of(harness.run(), "fits")) == 4
    reason, message = refusal(harness.add("too large", [1, 2, 3, 4, 5], max_tokens=5))
    assert reason == "kv_full"
    assert message == (
        "5 prompt tokens and up to 5 answer tokens need 9 KV slots, this worker has 8 (2 blocks of 4); "
        "lower max_tokens, shorten the prompt or give the worker more KV memory"
    )
    harness.assert_nothing_is_left()


def test_a_full_queue_refuses_and_an_abort_makes_room() -> None:
    harness = EngineHarness(max_num_waiting=2)
    harness.add("a", [1])
    harness.add("b", [1])
    reason, message = refusal(harness.add("c", [1]))
    assert reason == "queue_full"
    assert message == "2 requests are here already; try again later or raise --max-num-waiting"
    harness.core.scheduler.abort("a")
    assert harness.add("c", [1]) == [Reserved("c", 0)]
    harness.run()
    harness.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("tokens", "num_prompt_tokens", "message"),
    [
        ([], 0, "the prompt has no tokens; send at least one"),
        ([1, 2], 0, "num_prompt_tokens is 0, must be from 1 to the 2 tokens given"),
        ([1, 2], 3, "num_prompt_tokens is 3, must be from 1 to the 2 tokens given"),
        ([1, 10_000], 2, "token id 10000 is not in this model's vocabulary of 10,000"),
        ([1, -1], 2, "token id -1 is not in this model's vocabulary of 10,000"),
    ],
)
def test_nonsense_is_refused_by_name(tokens: list[int], num_prompt_tokens: int, message: str) -> None:
    harness = EngineHarness()
    assert refusal(harness.add("a", tokens, num_prompt_tokens=num_prompt_tokens)) == ("invalid", message)
    harness.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("root", "hashes"), [("xyz", []), ("ab", []), (ROOT.hex(), ["00" * 15]), (ROOT.hex(), ["00" * 16] * 2)]
)
def test_hashes_that_cannot_be_are_refused(root: str, hashes: list[str]) -> None:
    harness = EngineHarness()
    command = AddRequest("a", [1, 2, 3, 4], 4, SamplingParams(max_tokens=1), hash_root=root, block_hashes=hashes)
    assert refusal(harness.core.handle(command))[0] == "invalid"
    harness.assert_nothing_is_left()


def test_a_request_that_is_here_already_is_refused_and_the_first_goes_on() -> None:
    harness = EngineHarness()
    harness.add("a", [1, 2], max_tokens=1)
    assert refusal(harness.add("a", [1, 2]))[0] == "invalid"
    assert tokens_of(harness.run(), "a") == [1002]
    harness.assert_nothing_is_left()


def test_several_choices_are_refused_outside_prefill() -> None:
    harness = EngineHarness()
    assert refusal(harness.add("a", [1, 2], choice_seeds=[1, 2]))[0] == "unsupported"
    harness.assert_nothing_is_left()


def test_a_configuration_without_sense_names_field_and_value() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0, must be at least 1"):
        SchedulerConfig(num_blocks=1, block_size=4, context_length=8, vocab_size=9, max_num_seqs=0)
