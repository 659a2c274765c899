"""What workers tell of other gateways is summed once, and not for each question."""

from __future__ import annotations

import math
import random

import pytest

from control_plane.admission.elsewhere import AccountTurn, Elsewhere, LetIn


def turn(account: str, lead: float, per_second: float = 0.0, service_class: int = 1) -> AccountTurn:
    return AccountTurn(account, service_class, lead, 1, 5.0, per_second)


def test_sums_are_those_of_the_workers_that_are_there_whatever_they_told_before() -> None:
    chance, elsewhere = random.Random(5), Elsewhere()
    told: dict[str, list[AccountTurn]] = {}
    for step in range(500):
        worker = f"w-{chance.randrange(6)}"
        if chance.random() < 0.1:
            elsewhere.forget(worker)
            told.pop(worker, None)
        else:
            names = chance.sample("abcdefgh", chance.randrange(5))
            told[worker] = [turn(name, chance.uniform(0, 1e9), chance.uniform(0, 100)) for name in names]
            elsewhere.take(worker, told[worker], LetIn(), step / 1000)
        leads, rates = dict[str, float](), dict[tuple[int, str], float]()
        for each in (each for turns in told.values() for each in turns):
            leads[each.account] = leads.get(each.account, 0.0) + each.lead
            rates[1, each.account] = rates.get((1, each.account), 0.0) + each.work_per_second
        assert elsewhere.leads().get(1, {}) == pytest.approx(leads, abs=0.01)
        if elsewhere.leads():
            assert elsewhere.work_per_second(step / 1000) == pytest.approx(rates, abs=0.01)


def test_what_is_no_number_and_what_is_absurd_stays_with_the_worker_that_told_it() -> None:
    elsewhere = Elsewhere()
    elsewhere.take("honest", [turn("a", 7.0, 3.0)], LetIn(), 0.0)
    elsewhere.take("liar", [turn("a", math.inf, math.nan), turn("b", -5.0, 1e300)], LetIn(), 0.0)
    elsewhere.take("liar", [], LetIn(), 0.1)
    assert elsewhere.leads() == {1: {"a": 7.0}} and elsewhere.work_per_second(0.1) == {(1, "a"): 3.0}
    assert elsewhere.work_per_second(9.0) == {}, "told too long ago"
