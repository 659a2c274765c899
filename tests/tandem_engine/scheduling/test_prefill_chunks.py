"""Tests that prompt chunks beside answers have a fixed size, and that prompts still finish."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.settings import EngineConfig
from tests.tandem_engine.scheduling.harness import EngineHarness, tokens_of


def harness_of(chunk: int, num_blocks: int = 1024) -> EngineHarness:
    return EngineHarness(
        num_blocks,
        context_length=1024,
        max_num_batched_tokens=256,
        max_num_waiting=64,
        max_prefill_tokens_with_decodes=chunk,
    )


def prefill_tokens_beside_answers(harness: EngineHarness) -> list[int]:
    """Run to the end; return the prompt tokens of each step that had both answers and prompts."""
    chunks: list[int] = []
    while harness.core.has_work():
        harness.step()
        runs = harness.last_runs()
        num_prompt_tokens = sum(number for _, first, number in runs if number > 1 or first == 0)
        if 0 < num_prompt_tokens < sum(number for _, _, number in runs):
            chunks.append(num_prompt_tokens)
    return chunks


def test_a_prompt_beside_answers_is_cut_to_chunks() -> None:
    harness = harness_of(64)
    for name in "ab":
        harness.add(name, [1, 2, 3], max_tokens=60)
    harness.step()
    harness.add("p", list(range(400)), max_tokens=1)
    assert prefill_tokens_beside_answers(harness) == [64] * 6 + [16]
    harness.assert_nothing_is_left()


def test_behind_a_long_context_chunks_beside_answers_are_smaller() -> None:
    harness = EngineHarness(
        1024, context_length=1024, max_num_batched_tokens=1024, max_prefill_context_with_decodes=64 * 128
    )
    harness.add("a", [1, 2, 3], max_tokens=200)
    harness.step()
    harness.add("p", list(range(800)), max_tokens=1)
    chunks: list[tuple[int, int]] = []
    while len(chunks) < 3 or chunks[-1][1] < 800:
        harness.step()
        chunks += [(first, first + number) for name, first, number in harness.last_runs() if name == "p"]
    assert chunks[:3] == [(0, 64), (64, 128), (128, 170)]
    assert all((end - first) * end <= 64 * 128 for first, end in chunks)
    assert all(end - first <= 64 and 2 * (end - first) * (end + 64) >= 64 * 128 for first, end in chunks[1:-1])
    harness.run()
    harness.assert_nothing_is_left()


def test_a_prompt_goes_on_token_by_token_where_its_context_is_beyond_the_limit() -> None:
    harness = EngineHarness(1024, context_length=1024, max_num_batched_tokens=64, max_prefill_context_with_decodes=16)
    harness.add("p", list(range(80)), max_tokens=2)
    harness.step()
    harness.add("a", [1], max_tokens=40)
    harness.add("b", [1], max_tokens=40)
    outputs = harness.run()
    assert tokens_of(outputs, "p") == [1080, 1081]
    assert harness.runner.steps[1] != [("a", 0, 1)]
    beside = [sum(n for name, first, n in step if first == 0 or name == "p") for step in harness.runner.steps[2:]]
    assert max(beside) <= 16
    harness.assert_nothing_is_left()


def test_where_nothing_answers_a_prompt_is_not_cut() -> None:
    harness = harness_of(4)
    harness.add("p", list(range(250)), max_tokens=1)
    harness.add("q", list(range(50)), max_tokens=1)
    harness.step()
    assert harness.last_runs() == [("p", 0, 250), ("q", 0, 6)]
    harness.run()
    harness.assert_nothing_is_left()


def test_prompts_share_one_chunk_in_order() -> None:
    harness = harness_of(4)
    harness.add("a", [1, 2, 3], max_tokens=20)
    harness.step()
    harness.add("p", list(range(10)), max_tokens=1)
    harness.add("q", list(range(9)), max_tokens=1)
    for _ in range(5):
        harness.step()
    chunks = [[run for run in step if run[0] != "a"] for step in harness.runner.steps[1:]]
    assert chunks == [[("p", 0, 4)], [("p", 4, 4)], [("p", 8, 2), ("q", 0, 2)], [("q", 2, 4)], [("q", 6, 3)]]
    harness.run()
    harness.assert_nothing_is_left()


def test_a_chunk_as_large_as_the_budget_cuts_nothing() -> None:
    harness = EngineHarness(64, context_length=256, max_num_batched_tokens=64, max_prefill_tokens_with_decodes=64)
    harness.add("a", [1, 2, 3], max_tokens=20)
    harness.step()
    harness.add("p", list(range(100)), max_tokens=1)
    harness.step()
    assert harness.last_runs() == [("a", 3, 1), ("p", 0, 63)]
    harness.run()
    harness.assert_nothing_is_left()


def test_a_preempted_answer_makes_room_in_the_chunk_again() -> None:
    harness = EngineHarness(6, max_num_batched_tokens=16, max_prefill_tokens_with_decodes=4)
    for name in "ab":
        harness.add(name, [1, 2, 3, 4], max_tokens=12)
    outputs = harness.run()
    assert harness.counter("preemptions") > 0
    for name in "ab":
        assert tokens_of(outputs, name) == [1000 + position for position in range(4, 16)]
    harness.assert_nothing_is_left()


def test_the_setting_is_at_least_one_and_64_by_default() -> None:
    assert EngineConfig("m").max_prefill_tokens_with_decodes == 64
    assert SchedulerConfig(1, 4, 8, 9).max_prefill_tokens_with_decodes == 64
    assert EngineConfig("m").max_prefill_context_with_decodes == 64 * 16_384
    assert SchedulerConfig(1, 4, 8, 9).max_prefill_context_with_decodes == 64 * 16_384
    with pytest.raises(ValueError, match="max_prefill_tokens_with_decodes is 0, must be at least 1"):
        EngineConfig("m", max_prefill_tokens_with_decodes=0)


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 300),
    prompts=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    num_answers=st.integers(1, 6),
)
def test_no_step_with_answers_has_more_prompt_tokens_and_every_prompt_ends(
    chunk: int, prompts: list[int], num_answers: int
) -> None:
    harness = harness_of(chunk)
    # 1. Prompts arrive while others answer.
    for number in range(num_answers):
        harness.add(f"a{number}", [number, 2, 3], max_tokens=100)
    harness.step()
    for number, length in enumerate(prompts):
        harness.add(f"p{number}", list(range(length)), max_tokens=2)
    start = len(harness.runner.steps)
    assert all(number <= chunk for number in prefill_tokens_beside_answers(harness))
    # 2. All ended.
    computed = sum(number for step in harness.runner.steps[start:] for name, _, number in step if name[0] == "p")
    assert computed == sum(prompts) + len(prompts)
    harness.assert_nothing_is_left()


@settings(max_examples=30, deadline=None)
@given(chunk=st.sampled_from([1, 3, 16, 64]), seed=st.integers(0, 100))
def test_the_chunk_changes_no_token(chunk: int, seed: int) -> None:
    harness = EngineHarness(128, context_length=256, max_prefill_tokens_with_decodes=chunk)
    for number in range(6):
        harness.add(str(number), [seed, *range(7 * number)], max_tokens=8)
    outputs = harness.run()
    for number in range(6):
        length = 7 * number + 1
        assert tokens_of(outputs, str(number)) == [1000 + position for position in range(length, length + 8)]
    harness.assert_nothing_is_left()
