"""Goodput, budgets and fair parts follow from what became of the requests, and a short overload is answered in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.overload.__main__ import NUM_TOKENS, SHARES, Asked, Load, Size, enter, fair_shares, measure_loads


def answered(account: str, at: float, first_at: float, ended_at: float) -> Asked:
    return Asked(account, at, 200, None, first_at, ended_at, NUM_TOKENS)


def refused(account: str, at: float) -> Asked:
    return Asked(account, at, 429, 0.010)


def test_an_account_gets_what_it_asks_for_and_at_most_an_equal_part_of_the_rest() -> None:
    assert fair_shares(1) == pytest.approx(SHARES)
    assert fair_shares(2) == pytest.approx({"greedy": 0.6, "small": 0.2, "other": 0.2})
    assert fair_shares(20) == pytest.approx(dict.fromkeys(SHARES, 1 / 3))


def test_a_load_is_judged_beside_the_first_by_goodput_budgets_parts_and_refusals() -> None:
    one = Load(1, 12.0, [answered("greedy", i, i + 0.1, i + 1) for i in range(2, 10)])
    fair = [answered(account, i, i + 1, i + 2) for i in (3, 5, 7) for account in SHARES]
    well = Load(20, 12.0, [*fair, *(refused("greedy", i) for i in range(10))])
    late = [answered("greedy", i, i + 9, i + 10) for i in range(2)]
    ill = Load(20, 12.0, [*fair[:3], *late, refused("small", 1.0)])
    outcome = Outcome()
    enter(outcome, [one, well, ill])
    assert [target.is_met for target in outcome.targets] == [True] * 4 + [False, False, False, True]
    assert outcome.figures["load_1_goodput"] == pytest.approx(0.8)
    assert outcome.figures["load_20_refused_share"] == pytest.approx(1 / 6)


@pytest.mark.timeout(120)
async def test_a_short_overload_is_answered_in_part(tmp_path: Path) -> None:
    (load,) = await measure_loads(Size((8.0,), 3.0), tmp_path / "overload", lambda line: None)
    statuses = {each.status for each in load.asked}
    assert statuses == {200, 429}
    assert all((each.status == 200) == (each.ended_at is not None) for each in load.asked)
