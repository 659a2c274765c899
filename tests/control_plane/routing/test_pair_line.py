"""What hand-overs of a pair of hosts take is learnt as a line, and no wilder than the hand-overs say."""

from __future__ import annotations

import random

import pytest

from control_plane.routing.pair_line import PairLine

MIB = 1 << 20
FIXED_MS, MS_PER_BYTE = 88.0, 24.0 / MIB
"""What is assumed."""


class Learner:
    def __init__(self, fixed_ms: float = FIXED_MS, ms_per_byte: float = MS_PER_BYTE) -> None:
        self.assumed = fixed_ms, ms_per_byte
        self.line, self.now = PairLine(), self.assumed

    def took(self, num_bytes: float, ms: float) -> None:
        self.line = self.line.plus(num_bytes, ms, *self.now)
        self.now = self.line.solved(*self.assumed)

    def ms(self, num_bytes: float) -> float:
        return self.now[0] + self.now[1] * num_bytes


def test_nothing_learnt_is_what_is_assumed() -> None:
    assert PairLine().solved(FIXED_MS, MS_PER_BYTE) == (FIXED_MS, MS_PER_BYTE)


def test_both_parts_are_found_from_hand_overs_of_different_lengths() -> None:
    rng, learner = random.Random(1), Learner()
    for _ in range(60):
        num_bytes = 50 * MIB * rng.random() ** 2
        learner.took(num_bytes, (170 + 12 * num_bytes / MIB) * rng.uniform(0.95, 1.05))
    for num_mib in (1, 4, 16, 48):
        assert learner.ms(num_mib * MIB) == pytest.approx(170 + 12 * num_mib, rel=0.1), num_mib


def test_short_hand_overs_say_little_of_bytes() -> None:
    learner = Learner()
    for _ in range(60):
        learner.took(2 * MIB, 400.0)
    assert learner.ms(2 * MIB) == pytest.approx(400, rel=0.02)
    assert learner.now[1] == pytest.approx(MS_PER_BYTE, rel=0.3)


def test_noise_within_a_host_is_not_taken_for_bytes() -> None:
    rng, learner = random.Random(2), Learner(8.0, 0.2 / MIB)
    for _ in range(200):
        learner.took(3 * MIB * rng.random(), rng.uniform(5.0, 25.0))
        assert learner.ms(100 * MIB) < 70.0


def test_one_that_takes_ten_seconds_is_outlived() -> None:
    learner = Learner()
    for _ in range(20):
        learner.took(2 * MIB, 150.0)
    learner.took(2 * MIB, 10_000.0)
    assert 200.0 < learner.ms(2 * MIB) < 500.0
    for _ in range(20):
        learner.took(2 * MIB, 150.0)
    assert learner.ms(2 * MIB) == pytest.approx(150, rel=0.3)


def test_a_pair_that_has_become_slow_is_found_out() -> None:
    learner = Learner()
    for num_bytes in 20 * (MIB, 40 * MIB):
        learner.took(num_bytes, 150.0)
    for _ in range(8):
        learner.took(2 * MIB, 5_000.0)
    assert learner.ms(2 * MIB) > 2_500.0


def test_no_part_is_ever_below_nothing_or_a_multiple_of_what_is_assumed() -> None:
    rng, learner = random.Random(3), Learner()
    for _ in range(500):
        learner.took(rng.choice((0.0, 1.0, 1e3, 1e6, 1e9, 1e12)), rng.choice((0.0, 1.0, 1e2, 1e4)))
        fixed_ms, ms_per_byte = learner.now
        assert fixed_ms >= 0.0 and MS_PER_BYTE / 8 <= ms_per_byte <= 8 * MS_PER_BYTE


def test_what_was_learnt_long_ago_gives_way_to_what_is_assumed() -> None:
    learner = Learner()
    for _ in range(20):
        learner.took(2 * MIB, 1_000.0)
    learner.line = learner.line.faded(0.001)
    assert learner.line.solved(*learner.assumed)[0] == pytest.approx(FIXED_MS, rel=0.02)
