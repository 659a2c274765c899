"""Engines in processes of their own take turns, and a failing one leaves the others alone."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from benchmarks.engine import process
from benchmarks.engine.kinds import OURS, PEERS, EngineKind, available
from benchmarks.engine.limits import Limits
from benchmarks.engine.process import EngineFault, EngineProcess, Room
from benchmarks.engine.stats import Phase
from benchmarks.engine.turns import Plan, Stage, measure_phases, needed_bytes, teams

_PLAN = Plan(num_rounds=3, num_steps=4, num_prompts=2, num_attempts=2, max_wait_seconds=0.0)
_ROOM = Room((0,), 1, 64)


def _kind(name: str, **settings: object) -> EngineKind:
    return EngineKind(name, "tests.benchmarks.counting_engine", "bf16", settings=settings)


@pytest.fixture(autouse=True)
def _no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "made", lambda shape, form: Path(f"{shape}-{form}"))


def test_contexts_pass_the_phases_length_half_way_and_fit_however_often_turns_are_repeated() -> None:
    phase = Phase(8, 512)
    start = _PLAN.start_tokens(phase)
    assert start == 512 - 3 * 5 // 2
    room = _PLAN.room(phase, (0, 1))
    assert room.max_batch == 8
    assert room.max_context >= start + 3 * 2 * 5
    assert _PLAN.room(Phase(0, 512), (0,)).max_batch == 1


def test_engines_that_do_not_fit_together_make_several_teams() -> None:
    kinds = [_kind(name) for name in "abc"]
    needed = needed_bytes(kinds[0], "S", _ROOM)
    names = [[kind.name for kind in team] for team in teams(kinds, "S", _ROOM, 2 * needed)]
    assert names == [["a", "b"], ["c"]]
    alone = [[kind.name for kind in team] for team in teams(kinds, "S", _ROOM, 0)]
    assert alone == [["a"], ["b"], ["c"]]


async def _limits() -> Limits:
    return Limits(1e9, 1e9, "by hand")


async def test_every_engine_takes_as_many_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    kinds = [_kind("slow", step_seconds=0.5), _kind("fast", step_seconds=0.25), _kind("broken", fails="decode")]
    said: list[str] = []
    stage = Stage((0,), tmp_path, said.append, _limits)
    found = {}
    async with aclosing(measure_phases(kinds, "tiny", (Phase(0, 64), Phase(8, 64)), _PLAN, stage)) as measuring:
        async for phase, turns in measuring:
            found[phase.name] = turns
    assert set(found["prefill"]) == {"slow", "fast", "broken"}
    assert found["prefill"]["slow"].tokens_per_second == [64 / 0.5] * 3
    assert found["prefill"]["slow"].limits == [await _limits()] * 3
    assert set(found["decode_b8"]) == {"slow", "fast"}
    assert found["decode_b8"]["slow"].tokens_per_second == [8 / 0.5] * 3
    assert found["decode_b8"]["fast"].tokens_per_second == [8 / 0.25] * 3
    assert found["decode_b8"]["fast"].peak_bytes > 0
    assert any("broken has failed" in line and "no more" in line for line in said)


async def test_an_engine_says_why_it_failed_and_takes_the_next_order(tmp_path: Path) -> None:
    engine = await EngineProcess.started(_kind("e", fails="prefill"), "tiny", _ROOM, tmp_path)
    try:
        with pytest.raises(EngineFault, match="e, command prefill: RuntimeError: no more"):
            await engine.prefill(8, seed=1)
        await engine.hold(2, 8)
        assert await engine.decode(3) == [1.0, 1.0, 1.0]
    finally:
        await engine.end()


async def test_an_engine_that_cannot_load_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="command load: RuntimeError: no more"):
        await EngineProcess.started(_kind("e", fails="load"), "tiny", _ROOM, tmp_path)
    with pytest.raises(EngineFault, match="command load: it has ended"):
        await EngineProcess.started(_kind("gone", dies="load"), "tiny", _ROOM, tmp_path)


def test_what_is_not_there_is_named_with_its_reason() -> None:
    kinds = [_kind("here"), EngineKind("there", "m", "bf16", installed_as="no such peer")]
    found, missing = available(kinds, None)
    assert [kind.name for kind in found] == ["here"]
    assert "make peers" in missing["there"]
    assert available(kinds, []) == ([], {})
    with pytest.raises(SystemExit, match="no such engine: nobody"):
        available(kinds, ["nobody"])


def test_a_variant_needs_the_settings_that_it_names() -> None:
    unknown = EngineKind("x", "m", "fp32", settings={"warp_speed": True, "block_size": 16}, is_ours=True)
    assert unknown.missing == "EngineConfig has no warp_speed"
    assert not EngineKind("x", "m", "fp32", settings={"block_size": 16}, is_ours=True).missing


def test_engines_have_different_names() -> None:
    names = [kind.name for kind in (*OURS, *PEERS)]
    assert len(set(names)) == len(names)
