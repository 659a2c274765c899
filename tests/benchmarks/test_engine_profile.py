"""The parts of a profile add up to its steps, and the profiled engine computes what the plain one does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.engine_profile.__main__ import Plan, Profile, add, measure_phases, plot
from benchmarks.engine_profile.timed_ops import PARTS, Stopwatch
from benchmarks.lib import random_model
from benchmarks.lib.command import Outcome
from tandem_engine.ops.cpu import KernelsUnavailable


def test_every_part_of_a_step_is_somebodys() -> None:
    watch = Stopwatch()
    watch.execute_seconds = 9.0
    watch.seconds |= {"attention": 4.0, "linear: head": 3.0, "sample": 1.5}
    parts = watch.parts_of(10.0)
    assert set(parts) == set(PARTS)
    assert (parts["scheduler"], parts["Python between"]) == (1.0, 0.5)
    assert sum(parts.values()) == 10.0
    watch.clear()
    assert watch.parts_of(2.0)["scheduler"] == 2.0


def test_what_comes_before_the_first_op_is_the_embedding() -> None:
    watch = Stopwatch()
    watch.forward_began, watch.is_before_ops = time.perf_counter() - 5, True
    assert watch.time("norms", lambda x: x + 1, 1) == 2
    assert watch.seconds["embedding"] >= 5
    before = watch.seconds["embedding"]
    watch.time("norms", lambda x: x + 1, 1)
    assert watch.seconds["embedding"] == before and watch.seconds["norms"] > 0


def test_figures_stand_under_shape_phase_and_part() -> None:
    outcome = Outcome()
    profile = Profile({"linear: head": 3.0, "Python between": 1.0}, [2.0, 2.0], [1.9, 1.9])
    add(outcome, "M", {"decode, batch 8": profile})
    assert outcome.figures["M.decode_batch_8.percent.linear_head"] == 75
    assert outcome.figures["M.decode_batch_8.plain_ms"] == pytest.approx(1900)
    assert ("clocks", "+5.3%") in outcome.sheets[0].rows


def test_a_tiny_engine_is_profiled_and_drawn(tmp_path: Path) -> None:
    from benchmarks.engine_profile.profiled_engine import ProfiledEngine

    try:
        engine = ProfiledEngine(random_model.made(tmp_path, "tiny"), 1, 32, 512)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    profiles = dict(measure_phases(engine, Plan(2, 2)))
    assert list(profiles) == ["prefill 512", "decode, batch 1", "decode, batch 8", "decode, batch 32"]
    for profile in profiles.values():
        assert sum(profile.percents.values()) == pytest.approx(100)
        assert all(profile.parts[part] > 0 for part in PARTS), profile.parts
    for name in ("a.svg", "b.svg"):
        plot({"tiny": profiles}, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert b"<svg" in drawn and drawn == (tmp_path / "b.svg").read_bytes()
