"""The figures of long prompts are what was measured, and each way is judged by what it is about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_prompts.__main__ import figures, targets
from benchmarks.long_prompts.asking import Answer, Streams
from benchmarks.long_prompts.services import Stall, longest_stall
from benchmarks.long_prompts.ways import Plan, Walked

_PLAN = Plan(num_tokens=128, arena_bytes=1 << 20, num_tail_tokens=16)
_ANSWER = Answer(10.0, (12.0, 12.1), (" a", " b"), (-0.5, -0.25), {})
_DECODE = {
    "prompt_tokens_computed": 0.0,
    "blocks_imported": 8.0,
    "longest_copy_seconds": 0.012,
    "longest_commands_seconds": 0.015,
    "longest_answer_step_seconds": 0.030,
}
_PREFILL = {
    "prompt_tokens_computed": 16.0,
    "prompt_tokens_cached": 112.0,
    "prompt_tokens_loaded": 112.0,
    "longest_copy_seconds": 0.031,
    "longest_copy_cpu_seconds": 0.011,
}


def _walked(**changes: Any) -> Walked:
    kv = {"kv-a": {"bytes_pulled": 0.0, "disk_hits": 7.0}}
    usual = {"answer": _ANSWER, "gaps": [0.01, 0.03], "alone": [0.01], "decode": _DECODE, "prefill": _PREFILL, "kv": kv}
    return Walked(**{**usual, **changes})


def _missed(name: str, walked: Walked) -> list[str]:
    return [target.text for target in targets(name, walked, _ANSWER, _PLAN) if not target.is_met]


def test_figures_are_in_the_units_of_their_names() -> None:
    found = figures(_walked())
    assert (found["ttft_s"], found["decode.copy_ms"], found["prefill.copy_ms"]) == pytest.approx((2.0, 12.0, 31.0))
    assert (found["gap_ms.p50"], found["gap_ms.max"], found["alone.gap_ms.max"]) == pytest.approx((20.0, 30.0, 10.0))
    assert (found["kv.disk_hits"], found["kv.stall_ms"]) == (7.0, 0.0)


def test_a_way_that_was_gone_meets_all_targets() -> None:
    assert _missed("store", _walked()) == _missed("disk", _walked()) == _missed("pool", _walked()) == []


def test_each_thing_that_goes_wrong_is_a_missed_target() -> None:
    assert _missed("cold", _walked()) == ["cold: prefill.computed = 16, at least 128"]
    assert _missed("host", _walked()) == ["host: kv.pulled_bytes = 0, at least 131072"]
    [computed] = _missed("store", _walked(decode=_DECODE | {"prompt_tokens_computed": 1.0}))
    assert computed == "store: decode computed 1 prompt tokens, at most 0"
    [other] = _missed("store", _walked(answer=Answer(0.0, (1.0, 2.0), (" a", " b"), (-0.5, -0.26), {})))
    assert other == "store: the answer is that of one worker"
    [long] = _missed("store", _walked(prefill=_PREFILL | {"longest_copy_cpu_seconds": 0.021}))
    assert long == "store: hand-over and load took 21.0 ms of a step, at most 20 ms"
    [stall] = _missed("store", _walked(stalls={"kv-a": Stall(0.025, 0.08, "somewhere")}))
    assert stall == "store: the KV service's loop computed for 25 ms at a stretch, at most 20 ms"
    waited = _walked(stalls={"kv-a": Stall(0.005, 0.08, "somewhere")})
    assert _missed("store", waited) == []
    slow = replace(waited, decode=_DECODE | {"longest_copy_seconds": 0.5})
    assert len([t for t in targets("store", slow, _ANSWER, _PLAN, by_clock=True) if not t.is_met]) == 1
    [stood] = [t.text for t in targets("store", waited, _ANSWER, _PLAN, by_clock=True) if not t.is_met]
    assert stood == "store: the KV service's loop stood still for 80 ms at a stretch, at most 20 ms"


def test_gaps_are_those_of_one_stream_that_end_within_a_time() -> None:
    running = Streams([[1.0, 1.5, 3.0], [2.0, 2.25]])
    assert running.gaps(1.5, 3.0) == pytest.approx([0.5, 0.25])


def test_the_longest_stall_is_found_in_the_log_from_a_place_on(tmp_path: Path) -> None:
    log = tmp_path / "kv.log"
    stalls = [
        {"event": "loop_stalled", "seconds": 1.0 - seconds, "cpu_seconds": seconds, "frames": [f"at {seconds}"]}
        for seconds in (0.9, 0.03, 0.02)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*stalls, {"event": "other"}]))
    assert longest_stall(log, 0) == Stall(0.9, 1.0 - 0.9, "at 0.9")
    assert longest_stall(log, 0, by_clock=True) == Stall(0.02, 0.98, "at 0.02")
    assert longest_stall(log, len(json.dumps(stalls[0])) + 1) == Stall(0.03, 0.97, "at 0.03")
