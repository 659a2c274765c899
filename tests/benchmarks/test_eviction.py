"""Tests that the replay counts the tokens that a cache of a given size would hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.eviction.__main__ import Trace, hit_rates, main, optimum, read_trace, replay


def trace_of(*prompts: list[int], block_tokens: int = 10, num_more_tokens: int = 1) -> Trace:
    """Return prompts of full blocks, given by hash ids, each with `num_more_tokens` more."""
    lines = [
        json.dumps({"input_length": len(ids) * block_tokens + num_more_tokens, "hash_ids": [*ids, 10_000 + index]})
        for index, ids in enumerate(prompts)
    ]
    return read_trace(lines, block_tokens)


def test_a_block_that_is_not_full_is_not_cached() -> None:
    trace = trace_of([1, 2], [1, 2])
    assert [len(prompt.keys) for prompt in trace.prompts] == [2, 2]
    assert trace.num_tokens == 42
    assert optimum(trace, 10) == 20


def test_one_token_is_always_computed() -> None:
    assert optimum(trace_of([1, 2], [1, 2], num_more_tokens=0), 10) == 19


def test_a_cache_that_holds_all_misses_only_what_is_new() -> None:
    trace = trace_of([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])
    assert replay(trace, 5) == optimum(trace, 5) == 50


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    assert replay(trace_of([1, 2, 3, 4], [1, 2, 3, 4]), 2) == 20


def test_lru_and_the_optimum_with_a_pencil() -> None:
    trace = trace_of([1], [2], [3], [1], [2], [3])
    assert replay(trace, 2) == 0  # each goes just before it is needed
    assert optimum(trace, 2) == 20  # keeps 1 and 2, and never stores 3


def test_lru_does_not_beat_the_optimum() -> None:
    trace = trace_of(*([1, 2, n % 7, 100 + n % 5, 200 + n] for n in range(3, 60)))
    figures = hit_rates(trace, [0.05, 0.2])
    for fraction in (0.05, 0.2):
        best = figures[f"token_hit_rate.{fraction}.optimum"]
        assert figures[f"token_hit_rate.{fraction}.lru"] <= best
        assert best <= figures["token_hit_rate.infinite"]


def test_the_command_prints_a_table_and_writes_flat_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"input_length": 1100, "hash_ids": [1, 2, n]}) + "\n" for n in range(3, 6)))
    assert main(["--trace", str(trace), "--quick", "--json", str(tmp_path / "figures.json")]) == 0
    assert "token hit rate" in capsys.readouterr().out
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert saved["figures"]["working_set_blocks"] == 2
    assert saved["figures"]["token_hit_rate.infinite"] == pytest.approx(2 * 1024 / 3300, rel=1e-5)
