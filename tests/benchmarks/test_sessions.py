"""Sessions over several gateways are compared with one gateway's: tokens found cached, and requests of each worker."""

from __future__ import annotations

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.sessions.__main__ import Found, Size, Turn, enter


def _found(num_gateways: int, workers: str, num_cached: int) -> Found:
    """Return one turn of 100 tokens for each letter, the name of its worker."""
    return Found(num_gateways, [Turn(worker, 100, num_cached, 1 + (num_gateways > 1)) for worker in workers])


def test_the_share_of_cached_tokens_and_the_busiest_worker_are_judged() -> None:
    outcome = Outcome()
    enter(outcome, [_found(1, "abcd" * 2, 80), _found(2, "aaabbbcd", 75)])
    assert outcome.figures["gateways_2.hit_rate_of_one"] == pytest.approx(0.9375)
    assert outcome.figures["gateways_1.busiest_of_mean"] == 1.0
    assert outcome.figures["gateways_2.busiest_of_mean"] == 1.5
    assert outcome.figures["gateways_2.asked_again"] == 8
    assert [target.is_met for target in outcome.targets] == [True, False, False]


def test_the_pools_keep_twice_what_all_sessions_have() -> None:
    size = Size(num_sessions=8, num_turns=3, first_tokens=128, turn_tokens=48)
    assert size.prompt_tokens == [128, 176, 224]
    assert size.pool_blocks * 4 * 16 >= 2 * 8 * (224 + 16) - 4 * 16
