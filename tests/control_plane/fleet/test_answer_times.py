"""What is usual among workers is of their latest answers, however it is asked for."""

from __future__ import annotations

import random

import pytest

from control_plane.fleet.answer_times import AnswerTimes


def test_the_usual_ratio_is_the_median_of_the_latest_answers_of_those_that_count() -> None:
    chance, times = random.Random(3), AnswerTimes()
    for number in range(400):
        if chance.random() < 0.02:
            times.forget(f"w{chance.randrange(6)}")
        times.add(f"w{chance.randrange(6)}", number, 0.01, chance.choice((0.1, 0.2, chance.random())), 0.1)
        for without in ((), ("w1",), ("w0", "w1", "w2", "w3", "w4")):
            usual = times.usual(without)
            assert times.usual_ratio(without) == (None if usual is None else usual.ratio)


def test_few_answers_say_nothing_and_old_ones_are_forgotten() -> None:
    times = AnswerTimes()
    for _ in range(4):
        times.add("a", 0.0, 0.01, 1.0, 0.1)
    assert times.usual_ratio(()) is None
    for _ in range(128):
        times.add("b", 0.0, 0.01, 0.3, 0.1)
    assert times.usual_ratio(()) == pytest.approx(3)
    assert times.usual_ratio(("b",)) is None, "those of a are no longer among the latest 128"
