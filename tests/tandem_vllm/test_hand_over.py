"""Tests how blocks of vLLM's pool are reserved, imported, announced and let go of, in blocks of four tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tandem_engine.layout import SourceLayout
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineEvent,
    ExtentRef,
    ImportSlab,
    PrefixBlock,
    Recompute,
    Refused,
    ReleaseHeld,
    RequestAborted,
    RequestOutput,
    Reserved,
    SlabImported,
    StartDecode,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_vllm.arrivals import Arrivals
from tandem_vllm.core import VllmCore
from tests.tandem_vllm.recorded_pool import (
    NUM_BLOCKS,
    SIZE,
    KeepingPublisher,
    RecordedBlocks,
    RecordedMemory,
    RecordedScheduler,
    exchange_of,
)

CONFIG = SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=SIZE, context_length=30, vocab_size=200)
ROOT = BlockHash(bytes(range(16)))


class World:
    """A core with a recorded vLLM."""

    def __init__(self, chunk: int = 100, ms_per_look: int = 0, window: int | None = None) -> None:
        """`ms_per_look`: how far the monotonic clock goes with each look at it, beside what `pass_seconds` adds."""
        self._passed_ns = 0
        self.blocks, self.memory, self.publisher = RecordedBlocks(), RecordedMemory(), KeepingPublisher()
        self.vllm = RecordedScheduler(self.blocks, self.memory, chunk)
        times = iter(range(1000, 100000))
        exchange = exchange_of(self.vllm, self.memory, self.publisher)
        looks = count(step=1_000_000 * ms_per_look)
        config = replace(CONFIG, window=window)
        self.core = VllmCore(
            config,
            self.vllm,
            clock=lambda: next(times),
            exchange=exchange,
            monotonic=lambda: next(looks) + self._passed_ns,
        )

    def pass_seconds(self, seconds: float) -> None:
        self._passed_ns += int(seconds * 1e9)

    def handle(self, command: Any) -> Sequence[EngineEvent]:
        self.core.begin_turn()
        events = self.core.handle_some(command)
        assert events is not None, "a slab of a few words fits the budget"
        return events

    def step(self) -> StepDone:
        events: list[Any] = []
        self.core.run_step(events.append)
        done: StepDone = events[0]
        return done

    def outputs(self) -> list[RequestOutput]:
        """Run until nothing is left to do."""
        outputs: list[RequestOutput] = []
        while self.core.has_work():
            outputs += self.step().outputs
        return outputs

    @property
    def counters(self) -> dict[str, float]:
        _, done = self.handle(AbortRequest("nobody"))
        assert isinstance(done, StepDone)
        return done.stats.counters

    def check_all_is_free(self) -> None:
        _, done = self.handle(AbortRequest("nobody"))
        assert isinstance(done, StepDone)
        stats = done.stats
        assert (stats.num_used_blocks, stats.num_held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
        assert self.blocks.num_available == NUM_BLOCKS


def request(request_id: str, num_tokens: int, mode: Any = "decode", max_tokens: int = 4, **more: Any) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(9,))
    return AddRequest(request_id, list(range(10, 10 + num_tokens)), num_tokens, sampling, mode, **more)


def extent(slot: int) -> ExtentRef:
    return ExtentRef("theirs", 0, 100, slot, 1)


def slab(request_id: str, *slots: int, first: int = 0, index: int = 0, **more: Any) -> ImportSlab:
    return ImportSlab(request_id, index, first, [extent(slot) for slot in slots], **more)


def hashed(num_tokens: int) -> dict[str, Any]:
    """The root and the keys of a prompt of `request`."""
    keys = hash_blocks(ROOT, list(range(10, 10 + num_tokens)), SIZE)
    return {"hash_root": ROOT.hex(), "block_hashes": [key.hex() for key in keys]}


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 10, 12])
def test_a_decode_request_computes_no_token_of_a_prompt_that_arrived(num_tokens: int) -> None:
    world = World()
    num_blocks = -(-num_tokens // SIZE)
    # 1. its blocks are taken at once, those of its first token included
    assert world.handle(request("d", num_tokens)) == [Reserved("d", 0)]
    assert world.blocks.num_available == NUM_BLOCKS - -(-(num_tokens + 1) // SIZE)
    assert not world.core.has_work()
    # 2. its slabs arrive
    for index in range(num_blocks):
        assert world.handle(slab("d", index, first=index, index=index)) == [SlabImported("d", index, 100)]
    # 3. it goes on behind token one, and vLLM's request has what arrived
    world.handle(StartDecode("d", [40]))
    done = world.step()
    assert [(output.position, output.num_computed_tokens) for output in done.outputs] == [(num_tokens + 1, 0)]
    table = world.vllm.tables["d"]
    assert [world.memory.content[block] for block in table[:num_blocks]] == [f"slot {i}" for i in range(num_blocks)]
    assert {world.blocks.references[block] for block in table} == {1}, "Tandem holds nothing beside vLLM any more"
    # 4. it ends, and nothing is left
    (*_, last) = world.outputs()
    assert (last.finish_reason, last.num_generated_tokens) == ("length", 3)
    assert world.counters["blocks_imported"] == num_blocks and world.counters["bytes_imported"] == 100 * num_blocks
    assert world.counters["reprefill_tokens"] == world.counters["prompt_tokens_computed"] == 0
    world.check_all_is_free()


def test_a_decode_request_that_does_not_fit_is_refused_at_once_and_leaves_nothing() -> None:
    world = World()
    assert world.handle(request("a", 20)) == [Reserved("a", 0)]  # six blocks
    (refused,) = world.handle(request("b", 8))  # three of two
    assert isinstance(refused, Refused) and refused.reason == "kv_full" and "2 of 8 are available" in refused.message
    (refused,) = world.handle(request("b", 5))  # two of two, but one must be left for the live one
    assert isinstance(refused, Refused) and refused.reason == "kv_full"
    assert world.blocks.num_available == 2
    world.handle(AbortRequest("a"))
    assert world.handle(request("b", 8)) == [Reserved("b", 0)]
    world.vllm.num_preempted = 1
    (refused,) = world.handle(request("c", 1))
    assert isinstance(refused, Refused) and "1 preempted" in refused.message


def offered(world: World, num_tokens: int, attempt: int, choice: int = 0, **more: Any) -> bool:
    """Offer a choice of the large hand-over; return whether it was accepted."""
    (event,) = world.handle(request(f"large-{attempt}-{choice}", num_tokens, choice_of="l", attempt=attempt, **more))
    return isinstance(event, Reserved)


def small(world: World, name: str) -> bool:
    (event,) = world.handle(request(name, 3))  # one block
    return isinstance(event, Reserved)


def test_a_large_hand_over_that_was_refused_for_long_gets_what_is_freed_before_small_ones() -> None:
    world = World()
    for index in range(3):
        assert small(world, f"s{index}")
    assert not offered(world, 20, 0), "six blocks, of five that are free"
    assert small(world, "early"), "its turn has not come"
    for attempt in range(1, 21):
        world.pass_seconds(0.25)
        assert not offered(world, 20, attempt)
    assert not small(world, "late")
    for name in ("early", "s0", "s1"):
        world.handle(AbortRequest(name))
    assert not small(world, "later"), "seven are free, and six are for the large one"
    assert offered(world, 20, 21)
    for name in ("s2", "large-21-0"):
        world.handle(AbortRequest(name))
    assert small(world, "last")
    world.handle(AbortRequest("last"))
    world.check_all_is_free()


def test_a_refused_hand_over_that_is_not_offered_any_more_keeps_nothing_from_anyone() -> None:
    world = World()
    assert small(world, "s")
    for attempt in range(24):
        world.pass_seconds(0.25)
        assert not offered(world, 26, attempt), "seven blocks and one for the other, of seven"
    world.handle(request("queued", 8, "aggregated", 1))
    assert not world.core.has_work() and world.core.is_held(), "it waits, although seven are free"
    world.pass_seconds(2.75)
    world.core.begin_turn()
    assert [output.request_id for output in world.outputs()] == ["queued"]
    assert not world.core.is_held()
    world.handle(AbortRequest("s"))
    world.check_all_is_free()


def test_a_hand_over_leaves_the_blocks_of_a_request_that_waits_here_unless_that_is_of_a_lower_class() -> None:
    world = World()
    world.handle(request("queued", 16, "aggregated", 1))  # four blocks, of eight that are free
    assert not offered(world, 14, 0), "four more, and one for what grows"
    assert offered(world, 14, 0, choice=1, priority=1)
    world.handle(AbortRequest("large-0-1"))
    assert [output.request_id for output in world.outputs()] == ["queued"]
    world.check_all_is_free()


def test_blocks_that_the_pool_has_are_not_imported_again() -> None:
    world = World()
    world.handle(request("a", 10, "aggregated", 1, **hashed(10)))
    world.outputs()
    assert world.handle(request("d", 10, **hashed(10))) == [Reserved("d", 2)]
    assert world.handle(slab("d", 0, 1, 2)) == [SlabImported("d", 0, 100)]  # the third alone was copied
    world.handle(StartDecode("d", [40]))
    assert world.step().outputs[0].num_computed_tokens == 0
    assert world.counters["blocks_imported"] == 1 and world.counters["prompt_tokens_cached"] == 8
    world.handle(AbortRequest("d"))
    world.check_all_is_free()


def test_a_stale_or_unexpected_slab_is_an_error_and_recompute_begins_with_the_first_missing_block() -> None:
    world = World()
    world.handle(request("d", 10))
    world.handle(slab("d", 0))
    world.memory.gone.add(1)
    (stale,) = world.handle(slab("d", 1, first=1, index=1))
    assert isinstance(stale, SlabImported) and stale.slab_index == 1 and "used again" in stale.error
    for wrong in (slab("x", 0), slab("d", 0, first=3), slab("d", 0, group=1)):
        (refused,) = world.handle(wrong)
        assert isinstance(refused, SlabImported) and refused.error
    world.handle(Recompute("d"))
    first = world.step().outputs[0]
    assert (first.position, first.num_computed_tokens) == (10, 6)
    assert world.counters["reprefill_tokens"] == 6
    assert world.outputs()[-1].finish_reason == "length"
    world.check_all_is_free()


def test_token_one_that_comes_behind_recompute_is_not_drawn_again() -> None:
    world = World(chunk=4)
    world.handle(request("d", 10))
    world.handle(Recompute("d"))
    assert not world.step().outputs
    world.handle(StartDecode("d", [40]))
    outputs = world.outputs()
    assert [output.position for output in outputs] == [11, 12, 13]
    assert world.vllm.num_tokens["d"] == 14, "vLLM knows token one too"
    world.handle(StartDecode("d", [40]))  # unknown by now
    world.check_all_is_free()


def test_an_answer_that_ends_with_token_one_ends_without_a_step() -> None:
    world = World()
    world.handle(request("d", 10))
    world.handle(StartDecode("d", [9]))
    (output,) = world.outputs()
    assert (output.finish_reason, output.is_last, output.token_ids) == ("stop", True, [])
    assert world.vllm.num_aborted == 0
    world.check_all_is_free()


def test_blocks_of_another_size_are_converted() -> None:
    world = World()
    layout = SourceLayout(2, "float32", "layer,head,token,kv,dim", 50)
    world.handle(request("d", 7))
    assert world.handle(slab("d", 0, 1, 2, 3, layout=layout)) == [SlabImported("d", 0, 400)]
    world.handle(StartDecode("d", [40]))
    assert world.step().outputs[0].num_computed_tokens == 0
    world.handle(AbortRequest("d"))
    world.check_all_is_free()


def test_a_prefill_announces_blocks_as_they_fill_and_holds_them_until_its_release() -> None:
    world = World(chunk=6)
    world.handle(request("p", 10, "prefill", choice_seeds=[1, 2]))
    (first,) = world.step().sealed
    assert (first.first_block, len(first.slots), first.is_last) == (0, 1, False)
    done = world.step()
    (last,) = done.sealed
    assert (last.first_block, len(last.slots), last.is_last) == (1, 2, True)
    assert [(output.choice_index, output.token_ids, output.is_last) for output in done.outputs] == [
        (0, [51], True),
        (1, [52], True),
    ]
    assert done.outputs[0].num_computed_tokens == 10
    # vLLM has forgotten the request; its blocks stay as they were announced
    assert (done.stats.num_held_blocks, done.stats.num_used_blocks, done.stats.num_waiting) == (3, 3, 0)
    assert [world.blocks.generations[block] for block in last.slots] == last.generations
    (released,) = world.handle(ReleaseHeld("p"))
    assert isinstance(released, StepDone) and released.stats.num_held_blocks == 0
    world.check_all_is_free()


def test_a_release_before_the_end_of_a_prefill_frees_its_blocks_at_the_end() -> None:
    world = World(chunk=6)
    world.handle(request("p", 10, "prefill"))
    world.step()
    world.handle(ReleaseHeld("p"))
    done = world.step()
    assert len(done.outputs) == 1 and not done.sealed and done.stats.num_used_blocks == 0
    world.check_all_is_free()


def test_prefills_get_to_vllm_while_all_have_room_to_their_end() -> None:
    world = World(chunk=4)
    for name in "abc":
        world.handle(request(name, 12, "prefill"))  # three blocks each, of eight
    assert [each.request_id for each in world.vllm.waiting] == ["a", "b"]
    finished = {output.request_id for output in world.outputs()}
    assert finished == {"a", "b"} and not world.core.has_work(), "c waits for a release"
    world.handle(ReleaseHeld("a"))
    assert world.core.has_work()
    assert [output.request_id for output in world.outputs()] == ["c"]
    world.handle(AbortRequest("b"))
    world.handle(AbortRequest("c"))
    world.check_all_is_free()


def test_filled_blocks_have_our_keys_and_their_bounds() -> None:
    world = World()
    keys = hashed(10)["block_hashes"]
    world.handle(request("a", 10, "aggregated", 4, **hashed(10)))
    world.outputs()
    all_tokens = [*range(10, 20), 51, 52, 53, 54]
    of_answer = hash_blocks(ROOT, all_tokens[:12], SIZE)[2].hex()
    assert [(each.parent, each.hashes) for each in world.publisher.filled] == [("", keys), (keys[1], [of_answer])]
    # bounds: others find the first block alone, and this request finds nothing
    bounded = {**hashed(10), "max_left_blocks": 1, "max_found_blocks": 0}
    world.handle(request("b", 10, "aggregated", 1, **bounded))
    (output,) = world.outputs()
    assert output.num_cached_tokens == 0
    assert [each.hashes for each in world.publisher.filled[2:]] == [keys[:1]]
    world.handle(request("c", 10, "aggregated", 1))
    assert world.outputs()[0].num_cached_tokens == 0 and len(world.publisher.filled) == 3


def test_a_prefix_is_loaded_once_and_what_is_gone_is_computed() -> None:
    world = World()
    prefix = [PrefixBlock(0, extent(7)), PrefixBlock(1, extent(8))]
    world.handle(request("a", 10, "aggregated", 1, prefix=prefix, **hashed(10)))
    events = [world.step(), world.step()]
    assert [done.admitted for done in events] == [["a"], []]
    (output,) = events[1].outputs
    assert (output.num_loaded_tokens, output.num_cached_tokens, output.num_computed_tokens) == (8, 8, 2)
    world.memory.gone.add(8)
    other = hashed(10) | {"hash_root": bytes(16).hex(), "block_hashes": ["00" * 16, "01" * 16]}
    world.handle(request("b", 10, "prefill", 1, prefix=prefix, **other))
    (output,) = world.outputs()
    assert (output.num_loaded_tokens, output.num_computed_tokens) == (0, 10)
    world.handle(ReleaseHeld("b"))
    world.check_all_is_free()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["aggregated", "prefill"])
def test_an_abort_after_any_step_leaves_nothing(mode: str, num_steps: int) -> None:
    world = World(chunk=6)
    prefix = [PrefixBlock(0, extent(7))]
    world.handle(request("a", 10, mode, prefix=prefix, **hashed(10)))
    for _ in range(num_steps):
        world.step()
    aborted, _ = world.handle(AbortRequest("a"))
    assert isinstance(aborted, RequestAborted)
    if mode == "prefill":
        assert "a" in world.publisher.forgotten
    world.check_all_is_free()


@pytest.mark.parametrize("num_commands", range(5))
def test_an_abort_after_any_command_of_a_hand_over_leaves_nothing(num_commands: int) -> None:
    world = World(chunk=6)
    commands = [request("d", 10), slab("d", 0), slab("d", 1, 2, first=1, index=1), StartDecode("d", [40])]
    for command in commands[:num_commands]:
        world.handle(command)
    if num_commands == len(commands):
        world.step()
    world.handle(AbortRequest("d"))
    world.check_all_is_free()


def test_a_request_that_fails_lets_go_of_its_blocks() -> None:
    world = World()
    world.vllm.failing.add("p")
    world.handle(request("p", 10, "prefill"))
    assert not world.outputs()
    assert "p" in world.publisher.forgotten
    world.check_all_is_free()


def test_a_load_that_nobody_goes_on_with_holds_no_blocks() -> None:
    """A request of a higher class comes while a prefix is loaded, and needs what the load has taken."""
    world = World(ms_per_look=20)  # a piece takes longer than a step may copy
    big = ExtentRef("theirs", 0, 5 << 20, 7, 1)
    prefix = [PrefixBlock(0, big), PrefixBlock(1, big)]
    world.handle(request("a", 10, "aggregated", 1, prefix=prefix, **hashed(10)))
    world.step()
    assert world.blocks.num_available == NUM_BLOCKS - 2 and world.core.has_work()
    world.handle(request("b", 30, "aggregated", 1, priority=5))  # all eight blocks
    assert not world.step().outputs
    assert [output.request_id for output in world.outputs()] == ["b", "a"]
    world.check_all_is_free()


def test_the_last_block_is_written_into_whatever_block_vllm_allocates() -> None:
    blocks, memory = RecordedBlocks(), RecordedMemory()
    arrivals = Arrivals(blocks, memory, SIZE)
    table = blocks.take(2)
    memory.content = {table[0]: "first", table[1]: "tail"}
    blocks.register(table[:1], [ROOT])
    arrivals.bring_table("d", table, 6)
    assert arrivals.num_matched_tokens("d", 4, 7) == 2
    assert arrivals.num_matched_tokens("d", 4, 7) == 2, "vLLM had no seat, and asks again"
    others = blocks.take(1)
    memory.content[others[0]] = "overwritten"
    mine = blocks.take(1)
    blocks.hold(table[:1])
    arrivals.placed("d", [table[0], *mine], 2)
    assert memory.content[mine[0]] == "tail" and memory.content[others[0]] == "overwritten"
    assert [blocks.num_references(block) for block in (table[0], *others, *mine)] == [1, 1, 1]
    assert arrivals.num_matched_tokens("d", 4, 7) == 0, "it is placed"


def test_a_prefill_of_a_model_with_a_window_hands_over_blocks_that_vllm_would_not_keep() -> None:
    world = World(window=6)
    prefix = [PrefixBlock(0, extent(7))]
    for name in ("a", "b"):
        world.handle(request(name, 10, "prefill", prefix=prefix, **hashed(10)))
        done = world.step()
        assert done.outputs[0].num_computed_tokens == 10 and len(done.sealed[0].slots) == 3
        assert done.admitted == [name]
        world.handle(ReleaseHeld(name))
    assert [each.hashes for each in world.publisher.filled] == [hashed(10)["block_hashes"]] * 2
    world.check_all_is_free()
