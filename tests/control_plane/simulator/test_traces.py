"""Traces are read in Mooncake's form and in Azure's; their arrivals can be changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.simulator.load import load_of
from control_plane.simulator.sources import MadeUpAgents, TracePart
from control_plane.simulator.synthetic import agentic_trace
from control_plane.simulator.traces import BadTrace, TraceRequest, jittered, line_of, part_of, read_trace, sped_up
from tests.control_plane.simulator.small_fleet import PLAIN, fleet, request


def test_a_line_of_mooncake_is_read_and_only_full_blocks_can_be_cached(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}\n\n')
    (read,) = read_trace(path)
    assert read == TraceRequest(0, 1.5, 1100, 7, (4, 5, 6))
    assert read.full_blocks == (4, 5)
    assert read.requested_tokens == 1024


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = [request(0), request(1, session="s", after=0, gap_seconds=0.5, max_tokens=9)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line_of(each)}\n" for each in trace))
    assert read_trace(path) == trace


def test_a_plain_line_has_the_fields_of_mooncake_alone() -> None:
    assert json.loads(line_of(TraceRequest(0, 0.25, 600, 7, (1, 2)))) == {
        "timestamp": 250.0,
        "input_length": 600,
        "output_length": 7,
        "hash_ids": [1, 2],
    }


def test_azure_has_lengths_and_no_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first.arrival, round(second.arrival, 3)) == (0.0, 4.315)
    assert (second.num_prompt_tokens, second.num_output_tokens, second.full_blocks) == (396, 109, ())


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 1, "output_length": 1}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}}\n{line}\n')
    with pytest.raises(BadTrace, match="line 2 is not a request of a Mooncake trace"):
        read_trace(path)


def test_a_part_starts_at_zero_and_a_lost_predecessor_is_not_followed() -> None:
    trace = [request(number, arrival=10.0 + number) for number in range(4)]
    trace[2], trace[3] = replace(trace[2], after=0), replace(trace[3], after=2)
    part = part_of(trace, 1, 3)
    assert [(each.number, each.arrival, each.after) for each in part] == [(0, 0.0, None), (1, 1.0, None), (2, 2.0, 1)]


def test_jitter_spreads_a_burst_and_keeps_followers_behind() -> None:
    trace = [request(number) for number in range(50)]
    trace[49] = replace(trace[49], after=0)
    moved = jittered(trace, 3.0, random.Random(1))
    assert [each.number for each in moved] == list(range(50))
    assert sorted(each.arrival for each in moved) == [each.arrival for each in moved]
    assert moved[0].arrival > 0 and moved[-1].arrival < 3.0
    assert all(each.after is None or each.after < each.number for each in moved)


def test_load_is_what_the_scarcer_half_needs() -> None:
    profile = replace(PLAIN, step_ms=0.001, answer_ms=0.0, max_num_seqs=1)
    trace = [request(0, prompt=100, answer=1), request(1, prompt=100, answer=1, arrival=1.0)]
    assert load_of(trace, fleet(worker=profile)) == pytest.approx(0.2, rel=0.001), "200 tokens of 1 ms in a second"
    assert load_of(trace, fleet(2, worker=profile)) == pytest.approx(0.1, rel=0.001)
    same = [trace[0], replace(trace[1], hash_ids=trace[0].hash_ids)]
    assert load_of(same, fleet(worker=profile)) == pytest.approx(0.104, rel=0.001), "96 of them are computed once"
    assert load_of(sped_up(same, 2.0), fleet(worker=profile)) == pytest.approx(0.208, rel=0.001)


def test_a_source_gives_the_wanted_load_and_the_same_requests_for_a_seed() -> None:
    trace = [request(number, arrival=number * 0.3) for number in range(100)]
    part = TracePart(trace, num_requests=40, jitter_seconds=0.1)
    chosen = part.arrivals(fleet(), 0.7, seed=3)
    assert load_of(chosen, fleet()) == pytest.approx(0.7)
    assert chosen == part.arrivals(fleet(), 0.7, seed=3) != part.arrivals(fleet(), 0.7, seed=4)


def test_agents_come_at_the_wanted_rate_from_the_start() -> None:
    big = fleet(8, 8, worker=replace(PLAIN, kv_tokens=1_000_000, prompt_ms=0.05, answer_ms=0.01))
    half, whole = (MadeUpAgents(2000).arrivals(big, load, seed=0) for load in (0.5, 1.0))
    spans = [max(each.arrival for each in trace) for trace in (half, whole)]
    assert 0.4 < spans[1] / spans[0] < 0.6, "twice the sessions in a second"
    gaps = [sum(each.gap_seconds for each in trace) / len(trace) for trace in (half, whole)]
    assert gaps[1] == pytest.approx(gaps[0], rel=0.2), "people and tools are no faster"


def test_the_prompts_of_a_session_grow_and_share_their_beginning() -> None:
    trace = agentic_trace(400, seed=5)
    followers = [each for each in trace if each.after is not None]
    assert len(followers) > 200
    for each in followers:
        assert each.after is not None
        before = trace[each.after]
        assert before.session == each.session and before.num_prompt_tokens < each.num_prompt_tokens
        assert each.full_blocks[: len(before.full_blocks)] == before.full_blocks
    of_sessions = Counter({each.session: each.full_blocks[:1] for each in trace if each.full_blocks}.values())
    assert of_sessions.most_common(1)[0][1] >= 10, "sessions of a kind of agent share a system prompt"
