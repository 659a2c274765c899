"""Tests an engine whose pool others cannot read: its region is small, and shows blocks as they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem_engine.assembly import AssembledEngine
from tandem_engine.core import EngineCore
from tandem_engine.execution.staging import DEFAULT_STAGING_BYTES, num_staging_slots
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    BlocksSealed,
    EngineEvent,
    ExtentRef,
    ImportSlab,
    MapRegion,
    ReleaseHeld,
    ReleaseSlabs,
    SealedBlocks,
    SlabImported,
    StartDecode,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams

BLOCK = 4
PROMPT = list(range(5, 5 + 26))
NUM_BLOCKS = 7
"""Of the prompt, the last one partly filled."""

Make = Callable[..., AssembledEngine]


def staged(make_engine: Make, num_slots: int, **settings: Any) -> AssembledEngine:
    size = 2 * 3 * 2 * 16 * BLOCK * 4  # keys and values, layers, heads, dimension, float32
    return make_engine("llama", block_size=BLOCK, kv_staging="always", kv_staging_bytes=num_slots * size, **settings)


def prefill(request_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> AddRequest:
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return AddRequest(request_id, list(prompt), len(prompt), sampling, mode="prefill", **fields)


def sealed_in(events: Sequence[EngineEvent]) -> list[SealedBlocks]:
    return [each for event in events if isinstance(event, StepDone | BlocksSealed) for each in event.sealed]


def run(core: EngineCore) -> list[EngineEvent]:
    """Step until there is no work; return all events."""
    events: list[EngineEvent] = []
    while core.has_work():
        core.run_step(events.append)
    return events


@pytest.mark.parametrize("num_kv_blocks", [40, 4000])
def test_the_region_is_as_large_as_asked_whatever_the_pool(num_kv_blocks: int, make_engine: Make) -> None:
    engine = staged(make_engine, 6, num_kv_blocks=num_kv_blocks)
    ready = engine.ready
    assert (ready.num_blocks, ready.num_slots, ready.max_held_slots) == (num_kv_blocks, 6, 3)
    assert ready.region_bytes == os.fstat(engine.region_fds[0]).st_size
    assert ready.region_bytes <= 6 * ready.bytes_per_slot + 4096 + 6 * 8
    assert engine.core.runner._cache.slots is None, "the pool has no region of its own"  # type: ignore[attr-defined]


def test_the_region_is_never_larger_than_the_pool_and_has_a_slot(make_engine: Make) -> None:
    assert staged(make_engine, 1000, num_kv_blocks=40).ready.num_slots == 40
    assert make_engine("llama", kv_staging="always", kv_staging_bytes=1, num_kv_blocks=40).ready.num_slots == 1


@pytest.mark.parametrize("bytes_per_block", [4096, 2 << 20, 3 << 30])
def test_a_large_pool_has_a_region_of_a_gibibyte_by_itself(bytes_per_block: int) -> None:
    num_bytes = num_staging_slots(None, 1 << 40, bytes_per_block) * bytes_per_block
    assert num_bytes <= max(DEFAULT_STAGING_BYTES, bytes_per_block)
    assert num_bytes > DEFAULT_STAGING_BYTES - bytes_per_block


def test_a_prefill_waits_with_its_last_block_until_there_is_a_slot(make_engine: Make) -> None:
    core = staged(make_engine, 6).core
    core.handle(prefill("a"))
    events = run(core)
    outputs = [output for event in events if isinstance(event, StepDone) for output in event.outputs]
    assert [output.is_last for output in outputs] == [True], "token one waits for no slot"
    announced = sealed_in(events)
    assert sum(len(each.slots) for each in announced) == 3 and not any(each.is_last for each in announced)
    for num_copied in (3, 6):
        announced += sealed_in(core.handle(ReleaseSlabs("a", num_copied)))
    assert [each.is_last for each in announced] == [False] * (len(announced) - 1) + [True]
    assert sum(len(each.slots) for each in announced) == NUM_BLOCKS
    assert {each.region_id for each in announced} == {""}
    core.handle(ReleaseHeld("a"))
    assert _is_idle(core)


@pytest.mark.parametrize("end", [ReleaseHeld, AbortRequest])
def test_the_end_of_one_prefill_lets_the_blocks_of_the_next_out(
    end: type[ReleaseHeld | AbortRequest], make_engine: Make
) -> None:
    core = staged(make_engine, 3).core
    for name in "abcd":
        core.handle(prefill(name, [*PROMPT[:3], ord(name)]))
    events = run(core)
    assert [each.request_id for each in sealed_in(events)] == ["a", "b", "c"]
    assert [each.request_id for each in sealed_in(core.handle(end("b")))] == ["d"]
    for name in "acd":
        core.handle(ReleaseHeld(name))
    assert _is_idle(core)


def test_a_small_pool_serves_others_while_a_dropped_copy_waits(make_engine: Make) -> None:
    """A block that was freed before its copy had a slot is used by others; nothing wrong is shown."""
    core = staged(make_engine, 2, num_kv_blocks=8).core
    core.handle(prefill("a", PROMPT[:12]))
    run(core)
    core.handle(AbortRequest("a"))
    core.handle(prefill("b", [9] * 28))
    announced = sealed_in(run(core))
    while not announced[-1].is_last:
        num_copied = sum(len(each.slots) for each in announced)
        announced += sealed_in(core.handle(ReleaseSlabs("b", num_copied)))
    assert sum(len(each.slots) for each in announced) == 7
    core.handle(ReleaseHeld("b"))
    assert _is_idle(core)


@pytest.mark.parametrize("verify_kv", [False, True])
def test_a_decode_engine_reads_from_the_ring_and_stages_nothing(verify_kv: bool, make_engine: Make) -> None:
    """With `verify_kv` the writer's checksums are those of the slots, and the reader compares them."""
    if verify_kv:
        pytest.importorskip("xxhash", reason="engines that verify make xxh3 checksums")
    expected = _answer(make_engine("llama", block_size=BLOCK).core)
    writer = staged(make_engine, 6, verify_kv=verify_kv, region_id="ring")
    reader = staged(make_engine, 6, verify_kv=verify_kv)
    ready, size = writer.ready, writer.ready.bytes_per_slot
    region = MapRegion("ring", ready.region_bytes, ready.num_slots, ready.generations_offset)
    reader.core.handle(region, writer.region_fds[0])
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    reader.core.handle(AddRequest("a", PROMPT, len(PROMPT), sampling, mode="decode"))
    writer.core.handle(prefill("a"))
    events = run(writer.core)
    waiting, index, num_copied = sealed_in(events), 0, 0
    while waiting:
        each = waiting.pop(0)
        checksums = each.checksums or [0] * len(each.slots)
        assert all(checksums) == verify_kv
        extents = [
            ExtentRef(each.region_id, slot * size, size, slot, generation, checksum)
            for slot, generation, checksum in zip(each.slots, each.generations, checksums, strict=True)
        ]
        (imported,) = reader.core.handle(ImportSlab("a", index, each.first_block, extents))
        assert isinstance(imported, SlabImported) and not imported.error
        index, num_copied = index + 1, num_copied + len(extents)
        waiting += sealed_in(writer.core.handle(ReleaseSlabs("a", num_copied)))
    first = next(output for event in events if isinstance(event, StepDone) for output in event.outputs)
    reader.core.handle(StartDecode("a", first.token_ids))
    rest = [output for event in run(reader.core) if isinstance(event, StepDone) for output in event.outputs]
    assert [*first.token_ids, *(token for output in rest for token in output.token_ids)] == expected
    assert rest[-1].num_computed_tokens == 0
    assert reader.core.publisher.state["blocks_staged"] == 0
    writer.core.handle(ReleaseHeld("a"))
    assert _is_idle(writer.core) and _is_idle(reader.core)


def _answer(core: EngineCore) -> list[int]:
    core.handle(AddRequest("a", PROMPT, len(PROMPT), SamplingParams(max_tokens=6, temperature=0.0)))
    outputs = [output for event in run(core) if isinstance(event, StepDone) for output in event.outputs]
    return [token for output in outputs for token in output.token_ids]


def _is_idle(core: EngineCore) -> bool:
    state, stats = core.publisher.state, core.scheduler.stats()
    is_ring_idle = not state["staging_slots_held"] and not state["staging_blocks_waiting"]
    return is_ring_idle and not stats.num_used_blocks and not core.has_work()
