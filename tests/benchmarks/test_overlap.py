"""The overlap benchmark compares each side with the first one round by round, over the engines' sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.lib.served import ROOT
from benchmarks.overlap.__main__ import _rows, _Side


def test_a_side_that_takes_longer_has_a_ratio_below_one_and_misses() -> None:
    outcome = Outcome()
    old, slow, equal = [0.010, 0.012, 0.011], [0.020, 0.024, 0.022], [0.010, 0.0119, 0.0112]
    rows = _rows(outcome, "m", 8, {"old": old, "off": slow, "on": equal})
    assert [row[:5] for row in rows] == [
        ("8", "old", "11.00", "", ""),
        ("8", "off", "22.00", "old", "0.500"),
        ("8", "on", "11.20", "old", "1.000"),
    ]
    assert [target.is_met for target in outcome.targets] == [False, True]
    assert outcome.figures["m.8.off.high"] == 0.5


async def test_a_side_answers_rounds_of_requests_one_after_the_other(tmp_path: Path) -> None:
    load = {"model": "@tandem/demo", "num_threads": 1, "max_batch": 2, "num_tokens": 6, "settings": {"overlap": "on"}}
    side = await _Side.start(ROOT, load)
    try:
        seconds = [await asyncio.wait_for(side.answer(batch), 60) for batch in (1, 2)]
    finally:
        await side.stop()
    assert min(seconds) > 0


async def test_an_engine_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    load = {"model": str(tmp_path), "num_threads": 1, "max_batch": 1, "num_tokens": 2, "settings": {}}
    with pytest.raises(RuntimeError, match="an engine ended with 1"):
        await _Side.start(ROOT, load)
