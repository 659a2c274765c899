"""The scaled trace keeps the structure of the real one, and is compared with the right cache."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction.__main__ import Trace, replay, trace_of
from benchmarks.lib.command import Outcome
from benchmarks.lib.stats import Answer
from benchmarks.trace_replay.__main__ import add, main
from benchmarks.trace_replay.cached_prompt import NUM_PROMPT_TOKENS, check
from benchmarks.trace_replay.cached_prompt import add as add_cached
from benchmarks.trace_replay.mooncake import BLOCK_TOKENS, SCALE, TRACE_BLOCK_TOKENS, TraceRequest, read_requests
from benchmarks.trace_replay.replaying import POOL_BLOCKS, Capacity, Played
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root

_VOCAB_SIZE = 2000


@st.composite
def _lines(draw: st.DrawFn) -> list[str]:
    """Lines as Mooncake's: few hash ids, so that many prompts begin alike."""
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        hash_ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        num_before = TRACE_BLOCK_TOKENS * (len(hash_ids) - 1)
        input_length = num_before + draw(st.integers(SCALE, TRACE_BLOCK_TOKENS))
        output_length = draw(st.integers(1, 500))
        entry = {"timestamp": 0, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
        lines.append(json.dumps(entry))
    return lines


@settings(deadline=None)
@given(_lines())
def test_prompts_begin_alike_for_as_many_blocks_as_their_hash_ids_do(lines: list[str]) -> None:
    scaled, entries = read_requests(lines), [json.loads(line) for line in lines]
    hashes = [_hashes(request.token_ids(_VOCAB_SIZE)) for request in scaled]
    for mine, my_hashes in zip(entries, hashes, strict=True):
        assert len(my_hashes) == mine["input_length"] // TRACE_BLOCK_TOKENS, "full blocks stay full, others do not"
        for other, other_hashes in zip(entries, hashes, strict=True):
            num_alike = min(_num_alike(mine["hash_ids"], other["hash_ids"]), len(my_hashes), len(other_hashes))
            assert _num_alike(my_hashes, other_hashes) == num_alike


@settings(deadline=None)
@given(_lines())
def test_lengths_are_divided_and_never_nothing(lines: list[str]) -> None:
    for request, entry in zip(read_requests(lines), map(json.loads, lines), strict=True):
        assert len(request.token_ids(_VOCAB_SIZE)) == request.num_prompt_tokens == entry["input_length"] // SCALE
        assert request.num_output_tokens == max(1, entry["output_length"] // SCALE)
        assert all(2 <= token < _VOCAB_SIZE for token in request.token_ids(_VOCAB_SIZE))


def test_a_prompt_without_its_hash_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt of 17 tokens has 2 hash ids"):
        TraceRequest(17, 1, (1, 2))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=5, max_size=30), st.integers(1, 8))
def test_the_offline_lru_is_one_by_brute_force(prompts: list[list[int]], capacity: int) -> None:
    chains = [[_chain_id(ids, index) for index in range(len(ids))] for ids in prompts]  # a block has one predecessor
    trace = trace_of(((len(ids) * BLOCK_TOKENS + 1, ids) for ids in chains), BLOCK_TOKENS)
    assert replay(trace, capacity) == _brute_force(chains, capacity)


def _brute_force(prompts: list[list[int]], capacity: int) -> int:
    """Of a chain, earlier blocks count as used later; a prompt never evicts its own blocks."""
    present: OrderedDict[int, None] = OrderedDict()  # the least recently used first
    num_cached = 0
    for prompt in prompts:
        run = next((index for index, block in enumerate(prompt) if block not in present), len(prompt))
        num_cached += run * BLOCK_TOKENS
        new: list[int] = []
        for block in prompt[run:]:
            if len(present) + len(new) >= capacity:
                victim = next((each for each in present if each not in prompt), None)
                if victim is None:
                    break
                del present[victim]
            new.append(block)
        for block in reversed(new):
            present[block] = None
        for block in reversed(prompt[:run]):
            present.move_to_end(block)
    return num_cached


def test_the_real_system_is_set_against_all_the_blocks_it_could_keep() -> None:
    capacity = Capacity(1000)
    assert capacity.store_blocks == 1000 - 2 * POOL_BLOCKS
    requests = [TraceRequest(17, 1, (1, 2, 3)), TraceRequest(17, 1, (1, 2, 4)), TraceRequest(9, 1, (1, 5))]
    outcome = Outcome()
    counters = {"prompt_cache_blocks_not_published": 1.0, "prompt_cache_failures": 2.0}
    add(outcome, _trace(requests), requests, capacity, Played([0, 16, 0], 3, counters))
    assert outcome.figures["replay.token_hit_rate.infinite"] == pytest.approx(24 / 43)
    assert outcome.figures["replay.token_hit_rate.real"] == pytest.approx(16 / 43)
    assert outcome.figures["replay.ratio.real_to_lru"] == pytest.approx(16 / 24)
    assert [target.is_met for target in outcome.targets] == [False]
    add(outcome, _trace(requests), requests, capacity, Played([0, 16, 8], 3, counters))
    assert outcome.targets[-1].is_met


def test_too_small_a_cache_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="play more requests, or give a larger share"):
        Capacity(2 * POOL_BLOCKS)


def test_without_a_trace_the_command_says_where_to_get_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in ([], ["--trace", str(tmp_path / "none.jsonl")]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "github.com/kvcache-ai/Mooncake" in capsys.readouterr().err


def test_a_prompt_that_was_not_cached_as_it_should_be_is_no_figure() -> None:
    answers = {"uncached": [_answer(1.0, 0)], "from_store": [_answer(0.1, 2032)], "from_pool": [_answer(0.1, 2032)]}
    check(answers)
    with pytest.raises(RuntimeError, match=r"prompts from_store had \[0\] cached tokens, not 2032"):
        check({**answers, "from_store": [_answer(0.1, 0)]})


def test_the_cached_prompts_target_is_a_ratio_of_medians() -> None:
    outcome = Outcome()
    answers = {
        "uncached": [_answer(seconds, 0) for seconds in (1.0, 2.0, 9.0)],
        "from_store": [_answer(seconds, 2032) for seconds in (0.1, 0.3, 0.4)],
        "from_pool": [_answer(seconds, 2032) for seconds in (0.1, 0.2, 0.9)],
    }
    add_cached(outcome, answers, "0.5b")
    assert outcome.figures["cached.ratio.from_store_to_uncached"] == pytest.approx(0.15)
    assert [target.is_met for target in outcome.targets] == [False, True]


def _trace(requests: list[TraceRequest]) -> Trace:
    return trace_of(((request.num_prompt_tokens, request.hash_ids) for request in requests), BLOCK_TOKENS)


def _hashes(token_ids: list[int]) -> list[bytes]:
    return list(hash_blocks(hash_root(b"model", BLOCK_TOKENS, "", b"salt"), token_ids, BLOCK_TOKENS))


def _num_alike(first: list[int] | list[bytes], second: list[int] | list[bytes]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _chain_id(ids: list[int], index: int) -> int:
    return int("1" + "".join(map(str, ids[: index + 1])))


def _answer(ttft_seconds: float, num_cached_tokens: int) -> Answer:
    return Answer("t", 0.0, (ttft_seconds,), ttft_seconds, NUM_PROMPT_TOKENS, num_cached_tokens, 1)
