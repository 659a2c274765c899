"""Tests that a request takes from caches, and leaves there, no more than it may."""

from __future__ import annotations

from typing import Any

import pytest

from tandem_engine.messages import RequestOutput, StartDecode
from tandem_engine.scheduling.block_hash import hash_blocks
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, kv_of, slab, tokens_of

PROMPT = list(range(14))  # three full blocks of four tokens, and two tokens more
PREFIX = {0: 40, 1: 41, 2: 42}
HASHES = [block_hash.hex() for block_hash in hash_blocks(ROOT, PROMPT, 4)]


def harness_with_store() -> EngineHarness:
    """Return a harness, and a store with every block of the prompt."""
    harness = EngineHarness()
    kv = kv_of(PROMPT)
    harness.runner.remote = {40 + block: kv[4 * block : 4 * block + 4] for block in range(3)}
    return harness


def run(harness: EngineHarness, name: str, **fields: Any) -> tuple[RequestOutput, list[str]]:
    """Run a request to its end; return its last output, and the reported hashes."""
    harness.add(name, PROMPT, root=ROOT, **fields)
    last: list[RequestOutput] = []
    told: list[str] = []
    while harness.core.has_work():
        done = harness.step()
        last += [output for output in done.outputs if output.is_last]
        told += [block_hash for filled in done.filled for block_hash in filled.hashes]
    harness.assert_nothing_is_left()
    return last[-1], told


def counts(output: RequestOutput) -> tuple[int, int, int]:
    assert output.num_computed_tokens + output.num_cached_tokens == len(PROMPT)
    return output.num_computed_tokens, output.num_cached_tokens, output.num_loaded_tokens


def test_what_must_not_be_left_is_found_by_nobody_and_told_to_nobody() -> None:
    harness = EngineHarness()
    first, told = run(harness, "a", max_tokens=8, max_left_blocks=0)
    assert (counts(first), told, harness.pool.num_cached) == ((14, 0, 0), [], 0)
    again, _ = run(harness, "b")
    assert counts(again) == (14, 0, 0)


def test_what_must_not_be_found_is_computed_though_it_is_here_and_in_the_store() -> None:
    harness = harness_with_store()
    run(harness, "a")
    output, _ = run(harness, "b", max_found_blocks=0, prefix=PREFIX)
    assert counts(output) == (14, 0, 0)
    assert harness.runner.imported == []


def test_a_reader_finds_and_leaves_nothing() -> None:
    harness = EngineHarness()
    run(harness, "a", max_tokens=1)
    num_cached = harness.pool.num_cached
    output, told = run(harness, "b", max_tokens=8, max_left_blocks=0)
    assert (counts(output), told) == ((2, 12, 0), [])
    assert harness.pool.num_cached == num_cached == 3


def test_a_reader_that_loads_from_the_store_leaves_it_not_even_in_the_pool() -> None:
    harness = harness_with_store()
    output, told = run(harness, "a", max_left_blocks=0, prefix=PREFIX)
    assert (counts(output), told, harness.pool.num_cached) == ((2, 12, 12), [], 0)


def test_a_writer_finds_nothing_and_leaves_all_for_others() -> None:
    harness = harness_with_store()
    output, told = run(harness, "a", max_tokens=4, max_found_blocks=0, prefix=PREFIX)
    assert (counts(output), told[:3], len(told)) == ((14, 0, 0), HASHES, 4)
    output, told = run(harness, "b", max_tokens=4, max_found_blocks=0)  # again: what is known is told again, harmlessly
    assert (counts(output), told[:3]) == ((14, 0, 0), HASHES)
    assert counts(run(harness, "c", max_tokens=1)[0]) == (2, 12, 0)


@pytest.mark.parametrize(("bound", "num_computed"), [(0, 14), (1, 10), (2, 6), (3, 2)])
def test_a_bound_is_of_what_is_found_and_of_what_is_left_the_answer_not_at_all(bound: int, num_computed: int) -> None:
    # 1. Only so many blocks are left, none of the answer's.
    harness = harness_with_store()
    _, told = run(harness, "a", max_tokens=8, max_found_blocks=bound, max_left_blocks=bound)
    assert (told, harness.pool.num_cached) == (HASHES[:bound], bound)
    assert counts(run(harness, "b", max_tokens=1)[0]) == (num_computed, 14 - num_computed, 0)
    # 2. Only so many are found: here, by now all are,
    output, _ = run(harness, "c", max_tokens=1, max_found_blocks=bound, max_left_blocks=bound)
    assert counts(output) == (num_computed, 14 - num_computed, 0)
    # 3. and in the store.
    output, _ = run(harness_with_store(), "d", max_tokens=1, max_found_blocks=bound, prefix=PREFIX)
    assert counts(output) == (num_computed, 14 - num_computed, 14 - num_computed)


def test_with_half_found_here_only_the_bounds_rest_is_loaded() -> None:
    harness = harness_with_store()
    run(harness, "a", max_tokens=1, max_left_blocks=1)
    output, _ = run(harness, "b", max_tokens=1, max_found_blocks=2, prefix=PREFIX)
    assert counts(output) == (6, 8, 4)
    assert harness.runner.imported == [(41, harness.runner.imported[0][1])]


def test_a_prefill_hands_over_all_blocks_whatever_it_may_leave() -> None:
    harness = EngineHarness()
    harness.add("p", PROMPT, mode="prefill", root=ROOT, max_found_blocks=0, max_left_blocks=0)
    done = harness.step()
    (sealed,) = done.sealed
    assert (len(sealed.slots), sealed.is_last, done.filled) == (4, True, [])
    harness.core.scheduler.release_held("p")
    assert harness.pool.num_cached == 0
    harness.assert_nothing_is_left()


def test_a_decode_worker_imports_what_it_must_not_find_and_leaves_only_what_it_may() -> None:
    harness = harness_with_store()
    harness.runner.remote[43] = [*kv_of(PROMPT)[12:], 0, 0]
    run(harness, "a")  # all of it is here
    num_before = harness.pool.num_cached
    (reserved,) = harness.add(
        "d", PROMPT, mode="decode", root=ROOT, max_tokens=8, max_found_blocks=0, max_left_blocks=0
    )
    assert reserved.num_cached_blocks == 0  # type: ignore[union-attr]
    harness.core.handle(slab("d", 0, [40, 41, 42, 43]))
    harness.core.handle(StartDecode("d", [1014]))
    assert tokens_of(harness.run(), "d") == [1015, 1016, 1017, 1018, 1019, 1020, 1021]
    assert harness.pool.num_cached == num_before
    harness.assert_nothing_is_left()


def test_an_answer_that_goes_on_elsewhere_is_still_beyond_the_bound() -> None:
    harness = EngineHarness()
    so_far = [1014, 1015, 1016, 1017, 1018, 1019]  # with the prompt five full blocks
    harness.add(
        "m", [*PROMPT, *so_far], num_prompt_tokens=14, root=ROOT, max_tokens=12, max_found_blocks=3, max_left_blocks=3
    )
    assert tokens_of(harness.run(), "m") == [1020, 1021, 1022, 1023, 1024, 1025]
    assert harness.pool.num_cached == 3
    harness.assert_nothing_is_left()


def test_a_preempted_request_that_left_nothing_computes_it_again_and_answers_the_same() -> None:
    harness = EngineHarness(num_blocks=9)
    for name in ("a", "b"):
        harness.add(name, PROMPT, root=ROOT, max_tokens=10, max_left_blocks=0)
    outputs = harness.run()
    for name in ("a", "b"):
        assert tokens_of(outputs, name) == list(range(1014, 1024))
    assert harness.counter("preemptions") > 0 and harness.counter("prompt_tokens_cached") == 0
    assert harness.pool.num_cached == 0
    harness.assert_nothing_is_left()
