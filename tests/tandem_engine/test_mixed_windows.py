"""Tests that models with windows in some layers answer the same from a pool that keeps only visible blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem_engine.core import EngineCore
from tandem_engine.messages import (
    AddRequest,
    ExtentRef,
    ImportSlab,
    MapRegion,
    PrefixBlock,
    ReleaseHeld,
    RequestOutput,
    SealedBlocks,
    SlabImported,
    StartDecode,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks
from tandem_engine.scheduling.window_groups import most_blocks
from tests.checkpoints import WINDOW

BLOCK = 4
NUM_TOKENS = 40
ROOT = BlockHash(bytes(16))
KINDS = ["qwen2", "gemma2", "gemma3"]
Drain = Callable[[EngineCore], list[RequestOutput]]


def prompts() -> list[list[int]]:
    """Return eight prompts, most of them several windows long; every other one continues the one before."""
    rng = random.Random(5)
    result = []
    for length in (70, 33, 90, 12):
        prompt = [rng.randrange(3, 300) for _ in range(length)]
        result += [prompt, [*prompt, *(rng.randrange(3, 300) for _ in range(9))]]
    return result


def ask(request_id: str, prompt: list[int], seed: int, **fields: Any) -> AddRequest:
    hashes = [block_hash.hex() for block_hash in hash_blocks(ROOT, prompt, BLOCK)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
    return AddRequest(request_id, prompt, len(prompt), sampling, hash_root=ROOT.hex(), block_hashes=hashes, **fields)


def answers(core: EngineCore, drain: Drain, num_at_once: int) -> list[list[int]]:
    """Run the prompts in groups, and return the tokens of each."""
    of_request: dict[str, list[int]] = {}
    asks = [ask(str(index), prompt, index) for index, prompt in enumerate(prompts())]
    for start in range(0, len(asks), num_at_once):
        for command in asks[start : start + num_at_once]:
            of_request[command.request_id] = []
            core.handle(command)
        for output in drain(core):
            of_request[output.request_id] += output.token_ids
    core.scheduler.pool.check()
    assert core.scheduler.stats().num_used_blocks == 0
    return list(of_request.values())


def of_one_group(engine: Any) -> EngineCore:
    """Return a core that keeps all blocks of all layers, as if none had a window."""
    config = replace(engine.core.scheduler.config, group_window=engine.core.scheduler.config.context_length + 1)
    return EngineCore(config, engine.core.runner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_at_once", [1, 4])
def test_answers_are_the_same_though_blocks_behind_the_window_hold_others_tokens(
    kind: str, num_at_once: int, make_engine: Callable[..., Any], drain: Drain
) -> None:
    expected = answers(of_one_group(make_engine(kind, block_size=BLOCK, num_kv_blocks=1024)), drain, num_at_once=1)
    small = make_engine(kind, block_size=BLOCK, num_kv_blocks=36, max_num_batched_tokens=16)
    assert small.core.scheduler.config.group_window == WINDOW
    counters = []
    for core in (small.core, of_one_group(small)):
        assert answers(core, drain, num_at_once) == expected
        counters.append(core.scheduler.stats().counters)
    mixed, full = counters
    if num_at_once == 1:  # each second prompt finds what the first left of its window
        assert mixed["prompt_tokens_cached"] > 0
    else:  # more run side by side
        assert mixed["steps"] < full["steps"]
        assert mixed["preemptions"] < full["preemptions"]


@pytest.mark.parametrize(("route", "kernels"), [("lean", "torch"), ("transformers", "auto")])
def test_groups_make_no_difference_by_any_route(
    route: str, kernels: str, make_engine: Callable[..., Any], drain: Drain
) -> None:
    engine = make_engine("gemma2", block_size=BLOCK, num_kv_blocks=64, route=route, kernels=kernels)
    assert answers(engine.core, drain, num_at_once=4) == answers(of_one_group(engine), drain, num_at_once=1)


def test_staged_blocks_of_all_groups_are_those_of_the_pool(make_engine: Callable[..., Any], drain: Drain) -> None:
    """As on a device whose memory others cannot read."""
    core = make_engine("gemma2", block_size=BLOCK, num_kv_blocks=64, kv_staging="always").core
    core.handle(ask("p", prompts()[1], 3, mode="prefill"))
    sealed, _ = run_prefill(core)
    tables, num_seen = core.scheduler._requests["p"].tables, 0
    for event in sealed:
        for index, slot in enumerate(event.slots, event.first_block):
            block = tables[event.group][index]
            assert core.publisher._memory.slots.bytes_of(slot).tobytes() == core.runner._cache.read_block(block)
            num_seen += 1
    assert num_seen == 20 + 2 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_if_blocks_run_out(kind: str, make_engine: Callable[..., Any], drain: Drain) -> None:
    expected = answers(make_engine(kind, block_size=BLOCK, num_kv_blocks=1024).core, drain, num_at_once=1)
    small = make_engine(kind, block_size=BLOCK, num_kv_blocks=36, max_num_batched_tokens=8)
    config = small.core.scheduler.config
    num_tokens = max(map(len, prompts())) + NUM_TOKENS - 1
    fits_one = replace(config, num_blocks=most_blocks(config, num_tokens))
    core = EngineCore(fits_one, small.core.runner)
    assert answers(core, drain, num_at_once=8) == expected
    assert core.scheduler.stats().counters["preemptions"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_found", [0, 1])
def test_a_prefill_hands_over_of_windows_what_the_answer_sees(
    kind: str, num_found: int, make_engine: Callable[..., Any], drain: Drain
) -> None:
    prompt = prompts()[1]  # of 79 tokens: the one that follows sees from 64 on
    settings = {"block_size": BLOCK, "num_kv_blocks": 64}
    (expected,) = [drain_one(make_engine(kind, **settings).core, drain, ask("a", prompt, 3))]
    prefill = make_engine(kind, **settings, region_id="prefill", max_num_batched_tokens=24)
    decode = make_engine(kind, **settings)
    for engine in (prefill, decode)[: 2 * num_found]:  # both know the prompt's beginning
        drain_one(engine.core, drain, ask("before", prompts()[0], 0))
    prefill.core.handle(ask("p", prompt, 3, mode="prefill"))
    sealed, outputs = run_prefill(prefill.core)
    blocks = {group: [] for group in range(len(prefill.ready.layout.groups))}  # type: ignore[var-annotated]
    for event in sealed:
        blocks[event.group] += range(event.first_block, event.first_block + len(event.slots))
    assert sealed[-1].is_last
    assert blocks == {group: list(range(16 if group else 0, 20)) for group in blocks}
    assert prefill.core.scheduler.stats().num_held_blocks == sum(map(len, blocks.values()))
    decode.core.handle(map_region(prefill), prefill.region_fds[0])
    (reserved,) = decode.core.handle(ask("d", prompt, 3, mode="decode"))
    assert (reserved.num_cached_blocks > 0) == bool(num_found)
    for number, event in enumerate(sealed):
        (imported,) = decode.core.handle(
            ImportSlab("d", number, event.first_block, extents(prefill, event), event.group)
        )
        assert isinstance(imported, SlabImported) and not imported.error
    prefill.core.handle(ReleaseHeld("p"))
    decode.core.handle(StartDecode("d", outputs[0].token_ids))
    rest = drain(decode.core)
    assert [*outputs[0].token_ids, *(token for output in rest for token in output.token_ids)] == expected
    assert rest[-1].num_computed_tokens == 0
    for engine in (prefill, decode):
        engine.core.scheduler.pool.check()
        assert engine.core.scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_lies_ready_is_loaded_with_the_windows_of_its_end(
    kind: str, make_engine: Callable[..., Any], drain: Drain
) -> None:
    before, prompt = prompts()[:2]
    settings = {"block_size": BLOCK, "num_kv_blocks": 64}
    there, here = make_engine(kind, **settings, region_id="there"), make_engine(kind, **settings)
    expected = drain_one(make_engine(kind, **settings).core, drain, ask("a", prompt, 3))
    there.core.handle(ask("p", before, 3, mode="prefill"))
    sealed, _ = run_prefill(there.core)
    prefix = [
        PrefixBlock(event.first_block + place, extent, event.group)
        for event in sealed
        for place, extent in enumerate(extents(there, event))
        if event.first_block + place < len(before) // BLOCK
    ]
    here.core.handle(map_region(there), there.region_fds[0])
    assert drain_one(here.core, drain, ask("b", prompt, 3, prefix=prefix)) == expected
    num_loaded = here.core.scheduler.stats().counters["prompt_tokens_loaded"]
    assert num_loaded == 68  # 17 of its blocks are full: the groups with a window brought 13 to 16


def run_prefill(core: EngineCore) -> tuple[list[SealedBlocks], list[RequestOutput]]:
    sealed, outputs = [], []
    while core.has_work():
        done = core.step()
        sealed += done.sealed
        outputs += done.outputs
    return sealed, outputs


def drain_one(core: EngineCore, drain: Drain, command: AddRequest) -> list[int]:
    core.handle(command)
    return [token for output in drain(core) for token in output.token_ids]


def map_region(engine: Any) -> MapRegion:
    ready = engine.ready
    return MapRegion(ready.region_id, ready.region_bytes, ready.num_blocks, ready.generations_offset)


def extents(engine: Any, event: SealedBlocks) -> list[ExtentRef]:
    size = engine.ready.layout.bytes_per_block
    return [
        ExtentRef(engine.ready.region_id, slot * size, size, slot, generation)
        for slot, generation in zip(event.slots, event.generations, strict=True)
    ]
