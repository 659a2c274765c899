"""Does a preempted request get its blocks back from where they were handed to, if that beats computing them?"""

from __future__ import annotations

from tandem_engine.messages import OfferPrefix, PrefixBlock, StartDecode, StepDone
from tandem_engine.scheduling.block_hash import hash_blocks
from tandem_engine.scheduling.recovery import CopyRate, Recovery
from tandem_engine.scheduling.step_time import StepTimeModel, StepWork
from tests.tandem_engine.scheduling.harness import ROOT, World, extent, kv_of, slab, tokens_of


def crowded(seconds_per_token: float, seconds_per_block: float) -> tuple[World, StepDone]:
    """A world in which "b" has just been preempted, its 4 prompt and 4 answer tokens told to others as two blocks.

    "a" needs the blocks that "b" had, so that "b" will not find them here.
    """
    world = World(num_blocks=4, step_seconds=lambda work: 0.001 + seconds_per_token * work.num_prompt_tokens)
    world.runner.copy_seconds = seconds_per_block
    # 1. What a copy costs, and a prompt.
    world.runner.remote = {30: kv_of([9, 9, 9, 9])}
    world.add("copied", [9, 9, 9, 9, 9], max_tokens=1, root=ROOT, prefix={0: 30})
    world.add("computed", [8] * 16, max_tokens=1)
    world.run()
    # 2. Two answers that do not fit.
    world.add("a", [1, 2, 3, 4], max_tokens=12)
    world.add("b", [5, 6, 7, 8], max_tokens=6, root=ROOT)
    while not world.counter("preemptions"):
        done = world.step()
    return world, done


def offer(world: World, num_blocks: int = 2) -> list[object]:
    kv = kv_of([5, 6, 7, 8, 1004, 1005, 1006, 1007])
    world.runner.remote |= {50 + index: kv[4 * index : 4 * index + 4] for index in range(num_blocks)}
    blocks = [PrefixBlock(index, extent(50 + index)) for index in range(num_blocks)]
    return list(world.core.handle(OfferPrefix("b", blocks)))


def test_blocks_are_asked_for_and_loaded_when_that_is_faster() -> None:
    world, done = crowded(seconds_per_token=0.01, seconds_per_block=0.001)
    # 1. The preemption says which blocks are wanted back.
    hashes = [block_hash.hex() for block_hash in hash_blocks(ROOT, [5, 6, 7, 8, 1004, 1005, 1006, 1007], 4)]
    assert done.preempted == {"b": hashes}
    # 2. They are offered while it waits, copied as it comes back, and given back at once.
    assert offer(world) == []
    world.runner.imported.clear()
    outputs, admitted = [], []
    while world.core.has_work():
        done = world.step()
        outputs += done.outputs
        admitted += done.admitted
    assert [slot for slot, _ in world.runner.imported] == [50, 51]
    assert admitted == ["b"]
    assert ("b", 8, 1) in [run for step in world.runner.steps for run in step]
    assert tokens_of(outputs, "b") == [1009]
    # 3. Its prompt was computed once, and is accounted so.
    last = next(output for output in outputs if output.request_id == "b" and output.is_last)
    assert (last.num_computed_tokens, last.num_cached_tokens, last.num_loaded_tokens) == (4, 0, 0)
    assert world.counter("blocks_recovered") == 2
    world.assert_nothing_is_left()


def test_blocks_are_not_asked_for_when_computing_them_is_faster() -> None:
    world, done = crowded(seconds_per_token=0.0001, seconds_per_block=0.01)
    assert done.preempted == {}
    world.run()
    assert ("b", 0, 8 + 1) in [run for step in world.runner.steps for run in step]
    world.assert_nothing_is_left()


def test_an_offer_that_comes_too_late_is_given_back_at_once_and_one_for_nobody_too() -> None:
    world, _ = crowded(seconds_per_token=0.01, seconds_per_block=0.001)
    while world.core.scheduler._waiting.num_preempted:
        world.step()
    world.runner.imported.clear()
    (event,) = offer(world)
    assert isinstance(event, StepDone) and event.admitted == ["b"]
    (event,) = world.core.handle(OfferPrefix("nobody", []))
    assert isinstance(event, StepDone) and event.admitted == ["nobody"]
    world.run()
    assert world.runner.imported == []
    world.assert_nothing_is_left()


def test_what_is_offered_and_gone_is_computed() -> None:
    world, _ = crowded(seconds_per_token=0.01, seconds_per_block=0.001)
    offer(world)
    world.runner.stale_slots = {51}
    assert tokens_of(world.run(), "b") == [1009]
    assert ("b", 0, 8 + 1) in [run for step in world.runner.steps for run in step]
    assert world.counter("blocks_recovered") == 0
    world.assert_nothing_is_left()


def test_what_is_offered_though_computing_it_is_faster_is_not_loaded() -> None:
    world, _ = crowded(seconds_per_token=0.0001, seconds_per_block=0.01)
    world.runner.imported.clear()
    assert offer(world) == []
    done = [world.step() for _ in range(20) if world.core.has_work()]
    assert world.runner.imported == []
    assert [name for each in done for name in each.admitted] == ["b"]  # it is given back all the same
    world.assert_nothing_is_left()


def test_what_was_lent_with_the_request_is_not_read_again_after_a_preemption() -> None:
    world = World(num_blocks=4)
    world.runner.remote = {40: kv_of([5, 6, 7, 8])}
    world.add("a", [1, 2, 3, 4], max_tokens=12)
    world.add("b", [5, 6, 7, 8, 9], max_tokens=6, root=ROOT, prefix={0: 40})
    outputs = world.run()
    assert world.counter("preemptions") > 0
    assert len(world.runner.imported) == 1
    assert tokens_of(outputs, "b") == list(range(1005, 1011))
    world.assert_nothing_is_left()


def test_a_request_that_left_nothing_for_others_asks_for_nothing() -> None:
    world = World(num_blocks=4)
    world.add("a", [1, 2, 3, 4], max_tokens=12)
    world.add("b", [5, 6, 7, 8], max_tokens=6, root=ROOT, max_left_blocks=0)
    while not world.counter("preemptions"):
        done = world.step()
    assert done.preempted == {}
    world.run()
    world.assert_nothing_is_left()


def test_a_preempted_decode_request_gets_its_prompt_back_without_computing_it() -> None:
    world = World(num_blocks=6, step_seconds=lambda work: 0.01)
    world.runner.copy_seconds = 0.001
    prompt = [5, 6, 7, 8]
    for name, slot in (("a", 60), ("b", 61)):
        world.runner.remote[slot] = kv_of(prompt)
        world.add(name, prompt, mode="decode", max_tokens=16, root=ROOT if name == "b" else None)
        world.core.handle(slab(name, 0, [slot]))
        world.core.handle(StartDecode(name, [1004]))
    while not world.counter("preemptions"):
        done = world.step()
    outputs = list(done.outputs)
    num_blocks = len(done.preempted["b"])
    assert num_blocks == 3
    kv = kv_of([*prompt, *range(1004, 1012)])
    world.runner.remote |= {50 + index: kv[4 * index : 4 * index + 4] for index in range(3)}
    world.core.handle(OfferPrefix("b", [PrefixBlock(index, extent(50 + index)) for index in range(3)]))
    outputs += world.run()
    assert tokens_of(outputs, "b")[-4:] == [1016, 1017, 1018, 1019]
    assert world.counter("reprefill_tokens") == 0
    assert world.counter("blocks_recovered") > 0
    world.assert_nothing_is_left()


def test_one_slow_copy_changes_the_rate_little() -> None:
    rate = CopyRate()
    assert rate.seconds(1) is None
    for _ in range(10):
        rate.observe(10, 0.01)
    rate.observe(10, 10.0)
    seconds = rate.seconds(100)
    assert seconds is not None and 0.1 <= seconds <= 0.12


def test_until_both_are_measured_loading_is_tried() -> None:
    model = StepTimeModel()
    recovery = Recovery(model, block_size=16)
    assert recovery.is_loading_faster(0, 10)
    recovery.copies.observe(1, 1.0)
    assert recovery.is_loading_faster(0, 10)
    model.observe(StepWork(0, 0, 160, 160 * 80.0), 0.5)
    assert not recovery.is_loading_faster(0, 10)
