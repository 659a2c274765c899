"""Tests that a prefill request seals its blocks, samples a first token per choice, and holds its blocks."""

from __future__ import annotations

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import BlocksSealed, EngineEvent, SealedBlocks
from tandem_engine.scheduling.hand_over import seal
from tests.tandem_engine.scheduling.harness import ROOT, STOP, EngineHarness


def test_blocks_are_sealed_as_they_are_complete_the_tail_with_the_first_token_and_held() -> None:
    harness = EngineHarness(max_num_batched_tokens=6)
    harness.add("p", list(range(14)), mode="prefill")
    # 1. Six tokens fill one block, six more two others.
    assert harness.step().sealed == [SealedBlocks("p", 0, [0], [1], is_last=False)]
    done = harness.step()
    assert done.sealed == [SealedBlocks("p", 1, [1, 2], [1, 1], is_last=False)]
    assert done.outputs == []
    # 2. The last two lie in a block that is not full: it is sealed with the end of the prompt.
    done = harness.step()
    assert done.sealed == [SealedBlocks("p", 3, [3], [1], is_last=True)]
    output = done.outputs[0]
    assert (output.token_ids, output.position, output.finish_reason, output.is_last) == ([1014], 14, None, True)
    assert (output.num_computed_tokens, output.num_cached_tokens, output.num_generated_tokens) == (14, 0, 1)
    # 3. Held, and no work.
    assert (done.stats.num_running, done.stats.num_held_blocks, done.stats.num_used_blocks) == (0, 4, 4)
    assert not harness.core.has_work()
    # 4. Released: nothing is left.
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_a_prompt_that_fills_its_blocks_is_sealed_once_and_to_the_end() -> None:
    harness = EngineHarness()
    harness.add("p", list(range(8)), mode="prefill")
    assert harness.step().sealed == [SealedBlocks("p", 0, [0, 1], [1, 1], is_last=True)]
    harness.core.scheduler.abort("p")
    harness.assert_nothing_is_left()


def test_found_blocks_are_sealed_with_the_first_step_under_their_present_generation() -> None:
    harness = EngineHarness(max_num_batched_tokens=8)
    harness.add("first", list(range(9)), mode="prefill", root=ROOT)
    harness.run()
    harness.core.scheduler.release_held("first")
    harness.add("again", [*range(8), *range(50, 61)], mode="prefill", root=ROOT)
    assert harness.step().sealed == [SealedBlocks("again", 0, [0, 1, 3, 4], [1, 1, 1, 1], is_last=False)]
    done = harness.step()
    assert done.sealed == [SealedBlocks("again", 4, [5], [1], is_last=True)]
    assert (done.outputs[0].num_computed_tokens, done.outputs[0].num_cached_tokens) == (11, 8)
    harness.core.scheduler.release_held("again")
    harness.assert_nothing_is_left()


def test_each_choice_has_its_first_token_and_its_finish_reason() -> None:
    harness = EngineHarness()
    harness.add("p", [1, 2, 3], mode="prefill", choice_seeds=[7, 8, 9], max_tokens=2)
    outputs = harness.run()
    assert [(o.choice_index, o.token_ids, o.finish_reason) for o in outputs] == [
        (0, [1003], None),
        (1, [1103], None),
        (2, [1203], None),
    ]
    assert [o.num_generated_tokens for o in outputs] == [1, 1, 1]
    assert harness.counter("tokens_generated") == 3
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_a_first_token_that_is_the_last_says_why() -> None:
    harness = EngineHarness(context_length=8)
    harness.add("max_tokens", [1, 2, 3], mode="prefill", max_tokens=1)
    harness.add("context", list(range(8)), mode="prefill", max_tokens=9)
    harness.add("goes on", list(range(7)), mode="prefill", max_tokens=9)
    assert [o.finish_reason for o in harness.run()] == ["length", "length", None]
    harness.runner.stop_positions = {4}
    harness.add("stop", [1, 2, 3, 4], mode="prefill", max_tokens=1)
    last = harness.run()[-1]
    assert (last.token_ids, last.finish_reason) == ([STOP], "stop")
    for request_id in ("max_tokens", "context", "goes on", "stop"):
        harness.core.scheduler.release_held(request_id)
    harness.assert_nothing_is_left()


def test_a_release_before_the_end_frees_the_blocks_at_the_end_and_seals_nothing() -> None:
    harness = EngineHarness(max_num_batched_tokens=4)
    harness.add("p", list(range(6)), mode="prefill")
    harness.step()
    harness.core.scheduler.release_held("p")
    done = harness.step()
    assert (done.sealed, [o.token_ids for o in done.outputs]) == ([], [[1006]])
    harness.assert_nothing_is_left()


def test_an_abort_in_mid_prompt_gives_the_blocks_back() -> None:
    harness = EngineHarness(max_num_batched_tokens=4)
    harness.add("p", list(range(20)), mode="prefill")
    harness.step()
    harness.core.scheduler.abort("p")
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_the_prompt_of_a_migrated_request_ends_where_its_answer_began() -> None:
    harness = EngineHarness()
    harness.add("p", [1, 2, 3, 1003, 1004], num_prompt_tokens=3, mode="prefill", max_tokens=3)
    output = harness.run()[-1]
    assert (output.token_ids, output.position, output.finish_reason) == ([1005], 5, "length")
    assert (output.num_computed_tokens, output.num_generated_tokens) == (3, 1)
    harness.core.scheduler.release_held("p")
    harness.assert_nothing_is_left()


def test_blocks_are_sealed_before_their_step_has_drawn_a_token() -> None:
    harness = EngineHarness()
    harness.add("p", [1, 2, 3, 4, 5, 6], mode="prefill")
    said: list[EngineEvent] = []
    done = harness.step(said.append)
    assert said == [BlocksSealed([SealedBlocks("p", 0, [0, 1], [1, 1], is_last=True)])]
    assert done.sealed == [] and len(done.outputs) == 1


def test_a_step_that_breaks_after_its_blocks_were_sealed_seals_them_once() -> None:
    harness = EngineHarness()
    harness.add("p", [1, 2, 3, 4, 5], mode="prefill")
    harness.runner.breaks_when_sampling = RequestsFailed(["q"], "q's grammar cannot go on")
    harness.add("q", [9, 9, 9], mode="prefill")
    said: list[EngineEvent] = []
    assert harness.step(said.append).outputs == []
    assert [failed.request_id for failed in harness.core.take_failures()] == ["q"]
    done = harness.step(said.append)
    (event,) = said
    assert isinstance(event, BlocksSealed) and [each.request_id for each in event.sealed] == ["p", "q"]
    assert done.sealed == [] and [output.request_id for output in done.outputs] == ["p"]


def test_a_smaller_chunk_after_a_broken_step_seals_nothing_twice() -> None:
    harness = EngineHarness(max_num_batched_tokens=12)
    harness.add("p", list(range(12)), mode="prefill")
    request = harness.core.scheduler._requests["p"]
    harness.core.scheduler.seal_written(harness.core.scheduler.schedule())
    assert request.num_sealed_blocks == 3
    assert seal(request, 4, harness.core.scheduler._kv) == [] and request.num_sealed_blocks == 3


def test_only_what_is_left_to_compute_counts_as_work() -> None:
    """Routers take the figure for the queue: a prompt that is found in the cache, or half computed, is not all work."""
    harness = EngineHarness(64, max_num_batched_tokens=8, max_prefill_tokens_with_decodes=8)
    harness.add("p", list(range(20)), mode="prefill", max_tokens=1)
    in_flight = [harness.core.scheduler.stats().num_tokens_in_flight]
    while harness.core.has_work():
        harness.step()
        in_flight.append(harness.core.scheduler.stats().num_tokens_in_flight)
    assert in_flight[:4] == [20, 12, 4, 0]
