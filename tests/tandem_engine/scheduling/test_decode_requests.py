"""Tests that a decode request reserves, imports, starts, and recomputes what was not imported."""

from __future__ import annotations

from tandem_engine.messages import EngineEvent, Recompute, Refused, Reserved, SlabImported, StartDecode
from tandem_engine.scheduling.block_hash import hash_blocks
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, slab, tokens_of

PROMPT = list(range(10))  # three blocks, the last half full


def refusal(events: list[EngineEvent]) -> tuple[str, str]:
    assert len(events) == 1
    assert isinstance(events[0], Refused)
    return events[0].reason, events[0].message


def test_an_imported_request_goes_on_at_token_two_and_computes_no_prompt() -> None:
    harness = EngineHarness()
    # 1. Blocks at once, nothing to do until they have come.
    assert harness.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT) == [Reserved("d", 0)]
    stats = harness.core.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (3, 0, 1)
    assert not harness.core.has_work()
    # 2. Two slabs, copied in order into its block table.
    assert harness.core.handle(slab("d", 0, [20, 21])) == [SlabImported("d", 0, 200)]
    assert harness.core.handle(slab("d", 2, [22], 1)) == [SlabImported("d", 1, 100)]
    assert harness.runner.imported == [(20, 0), (21, 1), (22, 2)]
    # 3. The first token comes from prefill; the full blocks of the prompt can be found from now on.
    harness.core.handle(StartDecode("d", [1010]))
    assert harness.pool.find(hash_blocks(ROOT, PROMPT, 4)) == [0, 1]
    # 4. Each step computes the token before; output - 1 tokens are sampled here.
    outputs = harness.run()
    assert harness.runner.steps == [[("d", 10, 1)], [("d", 11, 1)], [("d", 12, 1)]]
    assert [(o.token_ids, o.position) for o in outputs] == [([1011], 11), ([1012], 12), ([1013], 13)]
    last = outputs[-1]
    assert (last.finish_reason, last.num_generated_tokens, last.num_computed_tokens) == ("length", 3, 0)
    assert (harness.counter("blocks_imported"), harness.counter("bytes_imported")) == (3, 300)
    assert harness.counter("reprefill_tokens") == 0
    # 5. Nothing is left but what can be found.
    assert harness.pool.num_cached == 3
    harness.assert_nothing_is_left()


def test_what_is_found_here_need_not_come_and_is_never_written() -> None:
    harness = EngineHarness()
    harness.add("before", [*range(8), 50], max_tokens=1, root=ROOT)
    harness.run()
    assert harness.add("d", PROMPT, mode="decode", max_tokens=2, root=ROOT) == [Reserved("d", 2)]
    assert harness.core.handle(slab("d", 1, [21, 22])) == [SlabImported("d", 0, 100)]
    assert harness.runner.imported == [(22, 3)]
    harness.core.handle(StartDecode("d", [1010]))
    last = harness.run()[-1]
    assert (last.token_ids, last.num_cached_tokens, last.num_computed_tokens) == ([1011], 8, 0)
    harness.assert_nothing_is_left()


def test_full_prompt_blocks_may_all_be_found_since_the_first_token_comes_from_prefill() -> None:
    harness = EngineHarness()
    harness.add("before", list(range(8)), max_tokens=1, root=ROOT)
    harness.run()
    assert harness.add("d", list(range(8)), mode="decode", max_tokens=2, root=ROOT) == [Reserved("d", 2)]
    harness.core.handle(StartDecode("d", [1008]))
    assert tokens_of(harness.run(), "d") == [1009]
    assert harness.last_runs() == [("d", 8, 1)]
    harness.assert_nothing_is_left()


def test_a_reservation_is_refused_unless_a_block_is_left_for_each_live_request() -> None:
    harness = EngineHarness(num_blocks=8)
    assert harness.add("a", PROMPT, mode="decode") == [Reserved("a", 0)]
    assert harness.add("b", PROMPT, mode="decode", max_tokens=9) == [Reserved("b", 0)]
    reason, message = refusal(harness.add("c", [1], mode="decode"))
    assert reason == "kv_full"
    assert message == (
        "1 KV blocks are needed and one for each of 2 live requests, 2 of 8 are available, "
        "0 preempted requests wait; try again later or another worker"
    )
    harness.core.scheduler.abort("b")
    assert harness.add("c", [1], mode="decode") == [Reserved("c", 0)]
    for request_id in ("a", "c"):
        harness.core.scheduler.abort(request_id)
    harness.assert_nothing_is_left()


def test_room_for_the_first_token_is_reserved_only_where_it_will_be_computed() -> None:
    harness = EngineHarness(num_blocks=4, context_length=8)
    harness.add("next block", [1, 2, 3, 4], mode="decode", max_tokens=2)
    assert harness.pool.num_used == 2
    harness.core.scheduler.abort("next block")
    harness.add("one token", [1, 2, 3, 4], mode="decode", max_tokens=1)
    assert harness.pool.num_used == 1
    harness.core.scheduler.abort("one token")
    harness.add("full context", list(range(8)), mode="decode", max_tokens=9)
    assert harness.pool.num_used == 2
    harness.core.scheduler.abort("full context")
    harness.assert_nothing_is_left()


def test_too_many_decode_requests_are_refused_as_a_full_queue() -> None:
    harness = EngineHarness(max_num_seqs=1, max_num_waiting=1)
    harness.add("a", [1], mode="decode")
    harness.add("b", [1], mode="decode")
    assert refusal(harness.add("c", [1], mode="decode"))[0] == "queue_full"
    for request_id in ("a", "b"):
        harness.core.scheduler.abort(request_id)
    harness.assert_nothing_is_left()


def test_a_copy_that_was_spoilt_is_reported_and_may_be_sent_again() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=2)
    harness.runner.stale_slots = {21}
    (event,) = harness.core.handle(slab("d", 0, [20, 21, 22]))
    assert event == SlabImported("d", 0, 0, "slot 21 of prefill was handed out again")
    harness.runner.stale_slots = set()
    assert harness.core.handle(slab("d", 0, [20, 21, 22])) == [SlabImported("d", 0, 300)]
    assert harness.core.handle(slab("d", 0, [20, 21, 22])) == [SlabImported("d", 0, 0)]
    harness.core.handle(StartDecode("d", [1010]))
    assert tokens_of(harness.run(), "d") == [1011]
    assert harness.counter("reprefill_tokens") == 0
    harness.assert_nothing_is_left()


def test_slabs_that_do_not_fit_or_belong_to_nobody_are_answered_with_an_error() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode")
    assert harness.core.handle(slab("unknown", 0, [1])) == [
        SlabImported("unknown", 0, 0, "request unknown does not wait for blocks")
    ]
    assert harness.core.handle(slab("d", 2, [1, 2])) == [
        SlabImported("d", 0, 0, "slab has blocks 2 to 4, the prompt has 3")
    ]
    assert harness.runner.imported == []
    harness.core.scheduler.abort("d")
    harness.assert_nothing_is_left()


def test_recompute_goes_on_from_the_first_missing_block_and_samples_the_first_token_itself() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=3, root=ROOT)
    harness.core.handle(slab("d", 0, [20]))
    harness.core.handle(slab("d", 2, [22]))
    harness.core.handle(Recompute("d"))
    outputs = harness.run()
    assert harness.runner.steps == [[("d", 4, 6)], [("d", 10, 1)], [("d", 11, 1)]]
    assert tokens_of(outputs, "d") == [1010, 1011, 1012]
    assert (outputs[-1].num_computed_tokens, harness.counter("reprefill_tokens")) == (6, 6)
    harness.assert_nothing_is_left()


def test_a_first_token_that_follows_a_recompute_is_not_sampled_again() -> None:
    harness = EngineHarness(max_num_batched_tokens=4)
    harness.add("d", PROMPT, mode="decode", max_tokens=3)
    harness.core.handle(Recompute("d"))
    harness.step()
    harness.core.handle(StartDecode("d", [1010]))
    outputs = harness.run()
    assert harness.runner.steps == [[("d", 0, 4)], [("d", 4, 4)], [("d", 8, 3)], [("d", 11, 1)]]
    assert tokens_of(outputs, "d") == [1011, 1012]
    harness.assert_nothing_is_left()


def test_a_first_token_that_comes_after_it_was_sampled_here_changes_nothing() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=3)
    harness.core.handle(Recompute("d"))
    outputs = harness.step().outputs
    harness.core.handle(StartDecode("d", [1010]))
    assert tokens_of(outputs + harness.run(), "d") == [1010, 1011, 1012]
    harness.assert_nothing_is_left()


def test_recompute_of_a_prompt_that_has_come_whole_writes_no_block_that_others_may_find() -> None:
    harness = EngineHarness()
    harness.add("d", list(range(8)), mode="decode", max_tokens=2, root=ROOT)
    harness.core.handle(slab("d", 0, [20, 21]))
    harness.core.handle(Recompute("d"))
    outputs = harness.run()
    assert harness.runner.steps == [[("d", 4, 4)], [("d", 8, 1)]]
    assert tokens_of(outputs, "d") == [1008, 1009]
    assert harness.counter("reprefill_tokens") == 4
    harness.assert_nothing_is_left()


def test_a_start_before_all_blocks_have_come_computes_the_missing_ones_here() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=2)
    harness.core.handle(slab("d", 0, [20, 21]))
    harness.core.handle(StartDecode("d", [1010]))
    assert tokens_of(harness.run(), "d") == [1011]
    assert harness.runner.steps == [[("d", 8, 3)]]
    assert harness.counter("reprefill_tokens") == 2
    harness.assert_nothing_is_left()


def test_a_first_token_that_is_the_last_ends_the_request_without_a_step_of_the_model() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=1)
    harness.core.handle(slab("d", 0, [20, 21, 22]))
    harness.core.handle(StartDecode("d", [1010]))
    assert harness.core.has_work()
    (output,) = harness.run()
    assert (output.token_ids, output.position, output.finish_reason, output.is_last) == ([], 11, "length", True)
    assert harness.runner.steps == []
    harness.assert_nothing_is_left()


def test_an_abort_before_the_last_word_was_sent_takes_it_back() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT, mode="decode", max_tokens=1)
    harness.core.handle(StartDecode("d", [1010]))
    harness.core.scheduler.abort("d")
    assert harness.run() == []
    harness.assert_nothing_is_left()


def test_a_preempted_decode_request_computes_prompt_and_answer_and_counts_the_prompt() -> None:
    harness = EngineHarness(num_blocks=4)
    for name in "ab":
        assert harness.add(name, [1, 2, 3], mode="decode", max_tokens=8) == [Reserved(name, 0)]
        harness.core.handle(slab(name, 0, [20]))
        harness.core.handle(StartDecode(name, [1003]))
    outputs = harness.run()
    assert tokens_of(outputs, "a") == tokens_of(outputs, "b") == list(range(1004, 1011))
    assert [("b", 0, 9)] in harness.runner.steps
    assert harness.counter("reprefill_tokens") == 3
    assert {o.request_id: o.num_preemptions for o in outputs if o.is_last} == {"a": 0, "b": 1}
    harness.assert_nothing_is_left()


def test_no_reservation_overtakes_a_preempted_request() -> None:
    harness = EngineHarness(num_blocks=4)
    for name in "ab":
        harness.add(name, [1, 2, 3], mode="decode", max_tokens=8)
        harness.core.handle(slab(name, 0, [20]))
        harness.core.handle(StartDecode(name, [1003]))
    while harness.core.scheduler.stats().num_waiting == 0:
        harness.step()
    assert harness.pool.num_available == 1
    reason, message = refusal(harness.add("c", [1], mode="decode", max_tokens=1))
    assert reason == "kv_full"
    assert "1 preempted requests wait" in message
    harness.run()
    harness.assert_nothing_is_left()


def test_a_migrated_request_imports_prompt_and_answer_so_far() -> None:
    harness = EngineHarness()
    harness.add("d", [1, 2, 3, 1003, 1004], num_prompt_tokens=3, mode="decode", max_tokens=4)
    harness.core.handle(slab("d", 0, [20, 21]))
    harness.core.handle(StartDecode("d", [1005]))
    (output,) = harness.run()
    assert (output.token_ids, output.position, output.finish_reason) == ([1006], 6, "length")
    harness.assert_nothing_is_left()


def test_a_prompt_that_was_all_here_and_whose_first_token_never_came_is_not_all_cached() -> None:
    harness = EngineHarness()
    harness.add("before", PROMPT[:8], root=ROOT)
    harness.run()
    assert harness.add("d", PROMPT[:8], mode="decode", root=ROOT) == [Reserved("d", 2)]
    harness.core.handle(Recompute("d"))  # prefill died
    last = harness.run()[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (4, 4), "what was computed was not cached"
    harness.assert_nothing_is_left()


def test_a_prompt_that_was_all_imported_and_whose_first_token_never_came_is_computed_at_its_end() -> None:
    harness = EngineHarness()
    harness.add("d", PROMPT[:8], mode="decode", root=ROOT)
    harness.core.handle(slab("d", 0, [20, 21]))
    harness.core.handle(Recompute("d"))
    last = harness.run()[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (4, 0)
    harness.assert_nothing_is_left()
