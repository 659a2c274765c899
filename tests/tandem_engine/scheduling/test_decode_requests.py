"""Tests that a decode request reserves, imports, starts, and recomputes what was not imported."""

from __future__ import annotations

from tandem_engine.messages import EngineEvent, Recompute, Refused, Reserved, SlabImported, StartDecode
from tandem_engine.scheduling.block_hash import hash_blocks
from tests.tandem_engine.scheduling.harness import ROOT, World, slab, tokens_of

PROMPT = list(range(10))  # three blocks, the last half full


def refusal(events: list[EngineEvent]) -> tuple[str, str]:
    assert len(events) == 1
    assert isinstance(events[0], Refused)
    return events[0].reason, events[0].message


def test_an_imported_request_goes_on_at_token_two_and_computes_no_prompt() -> None:
    world = World()
    # 1. Blocks at once, nothing to do until they have come.
    assert world.add("d", PROMPT, mode="decode", max_tokens=4, root=ROOT) == [Reserved("d", 0)]
    stats = world.core.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (3, 0, 1)
    assert not world.core.has_work()
    # 2. Two slabs, copied in order into its block table.
    assert world.core.handle(slab("d", 0, [20, 21])) == [SlabImported("d", 0, 200)]
    assert world.core.handle(slab("d", 2, [22], 1)) == [SlabImported("d", 1, 100)]
    assert world.runner.imported == [(20, 0), (21, 1), (22, 2)]
    # 3. The first token comes from prefill; the full blocks of the prompt can be found from now on.
    world.core.handle(StartDecode("d", [1010]))
    assert world.pool.find(hash_blocks(ROOT, PROMPT, 4)) == [0, 1]
    # 4. Each step computes the token before; output - 1 tokens are sampled here.
    outputs = world.run()
    assert world.runner.steps == [[("d", 10, 1)], [("d", 11, 1)], [("d", 12, 1)]]
    assert [(o.token_ids, o.position) for o in outputs] == [([1011], 11), ([1012], 12), ([1013], 13)]
    last = outputs[-1]
    assert (last.finish_reason, last.num_generated_tokens, last.num_computed_tokens) == ("length", 3, 0)
    assert (world.counter("blocks_imported"), world.counter("bytes_imported")) == (3, 300)
    assert world.counter("reprefill_tokens") == 0
    # 5. Nothing is left but what can be found.
    assert world.pool.num_cached == 3
    world.assert_nothing_is_left()


def test_what_is_found_here_need_not_come_and_is_never_written() -> None:
    world = World()
    world.add("before", [*range(8), 50], max_tokens=1, root=ROOT)
    world.run()
    assert world.add("d", PROMPT, mode="decode", max_tokens=2, root=ROOT) == [Reserved("d", 2)]
    assert world.core.handle(slab("d", 1, [21, 22])) == [SlabImported("d", 0, 100)]
    assert world.runner.imported == [(22, 3)]
    world.core.handle(StartDecode("d", [1010]))
    last = world.run()[-1]
    assert (last.token_ids, last.num_cached_tokens, last.num_computed_tokens) == ([1011], 8, 0)
    world.assert_nothing_is_left()


def test_full_prompt_blocks_may_all_be_found_since_the_first_token_comes_from_prefill() -> None:
    world = World()
    world.add("before", list(range(8)), max_tokens=1, root=ROOT)
    world.run()
    assert world.add("d", list(range(8)), mode="decode", max_tokens=2, root=ROOT) == [Reserved("d", 2)]
    world.core.handle(StartDecode("d", [1008]))
    assert tokens_of(world.run(), "d") == [1009]
    assert world.last_runs() == [("d", 8, 1)]
    world.assert_nothing_is_left()


def test_a_reservation_is_refused_unless_a_block_is_left_for_each_live_request() -> None:
    world = World(num_blocks=8)
    assert world.add("a", PROMPT, mode="decode") == [Reserved("a", 0)]
    assert world.add("b", PROMPT, mode="decode", max_tokens=9) == [Reserved("b", 0)]
    reason, message = refusal(world.add("c", [1], mode="decode"))
    assert reason == "kv_full"
    assert message == (
        "1 KV blocks are needed and one for each of 2 live requests, 2 of 8 are available, "
        "0 preempted requests wait; try again later or another worker"
    )
    world.core.scheduler.abort("b")
    assert world.add("c", [1], mode="decode") == [Reserved("c", 0)]
    for request_id in ("a", "c"):
        world.core.scheduler.abort(request_id)
    world.assert_nothing_is_left()


def test_room_for_the_first_token_is_reserved_only_where_it_will_be_computed() -> None:
    world = World(num_blocks=4, context_length=8)
    world.add("next block", [1, 2, 3, 4], mode="decode", max_tokens=2)
    assert world.pool.num_used == 2
    world.core.scheduler.abort("next block")
    world.add("one token", [1, 2, 3, 4], mode="decode", max_tokens=1)
    assert world.pool.num_used == 1
    world.core.scheduler.abort("one token")
    world.add("full context", list(range(8)), mode="decode", max_tokens=9)
    assert world.pool.num_used == 2
    world.core.scheduler.abort("full context")
    world.assert_nothing_is_left()


def test_too_many_decode_requests_are_refused_as_a_full_queue() -> None:
    world = World(max_num_seqs=1, max_num_waiting=1)
    world.add("a", [1], mode="decode")
    world.add("b", [1], mode="decode")
    assert refusal(world.add("c", [1], mode="decode"))[0] == "queue_full"
    for request_id in ("a", "b"):
        world.core.scheduler.abort(request_id)
    world.assert_nothing_is_left()


def test_a_copy_that_was_spoilt_is_reported_and_may_be_sent_again() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=2)
    world.runner.stale_slots = {21}
    (event,) = world.core.handle(slab("d", 0, [20, 21, 22]))
    assert event == SlabImported("d", 0, 0, "slot 21 of prefill was handed out again")
    world.runner.stale_slots = set()
    assert world.core.handle(slab("d", 0, [20, 21, 22])) == [SlabImported("d", 0, 300)]
    assert world.core.handle(slab("d", 0, [20, 21, 22])) == [SlabImported("d", 0, 0)]
    world.core.handle(StartDecode("d", [1010]))
    assert tokens_of(world.run(), "d") == [1011]
    assert world.counter("reprefill_tokens") == 0
    world.assert_nothing_is_left()


def test_slabs_that_do_not_fit_or_belong_to_nobody_are_answered_with_an_error() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode")
    assert world.core.handle(slab("unknown", 0, [1])) == [
        SlabImported("unknown", 0, 0, "request unknown does not wait for blocks")
    ]
    assert world.core.handle(slab("d", 2, [1, 2])) == [
        SlabImported("d", 0, 0, "slab has blocks 2 to 4, the prompt has 3")
    ]
    assert world.runner.imported == []
    world.core.scheduler.abort("d")
    world.assert_nothing_is_left()


def test_recompute_goes_on_from_the_first_missing_block_and_samples_the_first_token_itself() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=3, root=ROOT)
    world.core.handle(slab("d", 0, [20]))
    world.core.handle(slab("d", 2, [22]))
    world.core.handle(Recompute("d"))
    outputs = world.run()
    assert world.runner.steps == [[("d", 4, 6)], [("d", 10, 1)], [("d", 11, 1)]]
    assert tokens_of(outputs, "d") == [1010, 1011, 1012]
    assert (outputs[-1].num_computed_tokens, world.counter("reprefill_tokens")) == (6, 6)
    world.assert_nothing_is_left()


def test_a_first_token_that_follows_a_recompute_is_not_sampled_again() -> None:
    world = World(max_num_batched_tokens=4)
    world.add("d", PROMPT, mode="decode", max_tokens=3)
    world.core.handle(Recompute("d"))
    world.step()
    world.core.handle(StartDecode("d", [1010]))
    outputs = world.run()
    assert world.runner.steps == [[("d", 0, 4)], [("d", 4, 4)], [("d", 8, 3)], [("d", 11, 1)]]
    assert tokens_of(outputs, "d") == [1011, 1012]
    world.assert_nothing_is_left()


def test_a_first_token_that_comes_after_it_was_sampled_here_changes_nothing() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=3)
    world.core.handle(Recompute("d"))
    outputs = world.step().outputs
    world.core.handle(StartDecode("d", [1010]))
    assert tokens_of(outputs + world.run(), "d") == [1010, 1011, 1012]
    world.assert_nothing_is_left()


def test_recompute_of_a_prompt_that_has_come_whole_writes_no_block_that_others_may_find() -> None:
    world = World()
    world.add("d", list(range(8)), mode="decode", max_tokens=2, root=ROOT)
    world.core.handle(slab("d", 0, [20, 21]))
    world.core.handle(Recompute("d"))
    outputs = world.run()
    assert world.runner.steps == [[("d", 4, 4)], [("d", 8, 1)]]
    assert tokens_of(outputs, "d") == [1008, 1009]
    assert world.counter("reprefill_tokens") == 4
    world.assert_nothing_is_left()


def test_a_start_before_all_blocks_have_come_computes_the_missing_ones_here() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=2)
    world.core.handle(slab("d", 0, [20, 21]))
    world.core.handle(StartDecode("d", [1010]))
    assert tokens_of(world.run(), "d") == [1011]
    assert world.runner.steps == [[("d", 8, 3)]]
    assert world.counter("reprefill_tokens") == 2
    world.assert_nothing_is_left()


def test_a_first_token_that_is_the_last_ends_the_request_without_a_step_of_the_model() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=1)
    world.core.handle(slab("d", 0, [20, 21, 22]))
    world.core.handle(StartDecode("d", [1010]))
    assert world.core.has_work()
    (output,) = world.run()
    assert (output.token_ids, output.position, output.finish_reason, output.is_last) == ([], 11, "length", True)
    assert world.runner.steps == []
    world.assert_nothing_is_left()


def test_an_abort_before_the_last_word_was_sent_takes_it_back() -> None:
    world = World()
    world.add("d", PROMPT, mode="decode", max_tokens=1)
    world.core.handle(StartDecode("d", [1010]))
    world.core.scheduler.abort("d")
    assert world.run() == []
    world.assert_nothing_is_left()


def test_a_preempted_decode_request_computes_prompt_and_answer_and_counts_the_prompt() -> None:
    world = World(num_blocks=4)
    for name in "ab":
        assert world.add(name, [1, 2, 3], mode="decode", max_tokens=8) == [Reserved(name, 0)]
        world.core.handle(slab(name, 0, [20]))
        world.core.handle(StartDecode(name, [1003]))
    outputs = world.run()
    assert tokens_of(outputs, "a") == tokens_of(outputs, "b") == list(range(1004, 1011))
    assert [("b", 0, 9)] in world.runner.steps
    assert world.counter("reprefill_tokens") == 3
    assert {o.request_id: o.num_preemptions for o in outputs if o.is_last} == {"a": 0, "b": 1}
    world.assert_nothing_is_left()


def test_no_reservation_overtakes_a_preempted_request() -> None:
    world = World(num_blocks=4)
    for name in "ab":
        world.add(name, [1, 2, 3], mode="decode", max_tokens=8)
        world.core.handle(slab(name, 0, [20]))
        world.core.handle(StartDecode(name, [1003]))
    while world.core.scheduler.stats().num_waiting == 0:
        world.step()
    assert world.pool.num_available == 1
    reason, message = refusal(world.add("c", [1], mode="decode", max_tokens=1))
    assert reason == "kv_full"
    assert "1 preempted requests wait" in message
    world.run()
    world.assert_nothing_is_left()


def test_a_migrated_request_imports_prompt_and_answer_so_far() -> None:
    world = World()
    world.add("d", [1, 2, 3, 1003, 1004], num_prompt_tokens=3, mode="decode", max_tokens=4)
    world.core.handle(slab("d", 0, [20, 21]))
    world.core.handle(StartDecode("d", [1005]))
    (output,) = world.run()
    assert (output.token_ids, output.position, output.finish_reason) == ([1006], 6, "length")
    world.assert_nothing_is_left()


def test_a_prompt_that_was_all_here_and_whose_first_token_never_came_is_not_all_cached() -> None:
    world = World()
    world.add("before", PROMPT[:8], root=ROOT)
    world.run()
    assert world.add("d", PROMPT[:8], mode="decode", root=ROOT) == [Reserved("d", 2)]
    world.core.handle(Recompute("d"))  # prefill died
    last = world.run()[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (4, 4), "what was computed was not cached"
    world.assert_nothing_is_left()


def test_a_prompt_that_was_all_imported_and_whose_first_token_never_came_is_computed_at_its_end() -> None:
    world = World()
    world.add("d", PROMPT[:8], mode="decode", root=ROOT)
    world.core.handle(slab("d", 0, [20, 21]))
    world.core.handle(Recompute("d"))
    last = world.run()[-1]
    assert (last.num_computed_tokens, last.num_cached_tokens) == (4, 0)
    world.assert_nothing_is_left()
