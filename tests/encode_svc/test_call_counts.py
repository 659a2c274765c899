"""Both ends count the same calls, in whatever order calls and messages come."""

from __future__ import annotations

import pytest

from encode_svc.call_counts import Amount, CallCounts
from tandem_runtime.errors import InvalidRequest


def test_a_call_that_overtakes_others_tells_of_them() -> None:
    counts = CallCounts()
    assert counts.sent(3, 60) == Amount(3, 60)
    assert counts.came(3, 30) and counts.on_way == Amount(2, 30)
    assert counts.sent(1, 10) == Amount(0, 0), "known already"
    assert counts.came(1, 10) and counts.on_way == Amount(1, 20)
    assert counts.sent(2, 30) == Amount(0, 0)
    assert counts.came(2, 20) and counts.on_way == Amount(0, 0)


def test_a_call_that_ended_before_it_came_is_not_on_its_way_and_not_served() -> None:
    counts = CallCounts()
    counts.sent(2, 50)
    counts.ended(1, 20)
    assert counts.on_way == Amount(1, 30)
    assert not counts.came(1, 20)
    assert counts.came(2, 30) and counts.on_way == Amount(0, 0)


def test_a_call_that_had_come_when_its_end_is_told_was_counted_and_may_even_come_twice() -> None:
    counts = CallCounts()
    counts.sent(1, 20)
    assert counts.came(1, 20)
    counts.ended(1, 20)
    assert counts.on_way == Amount(0, 0)
    assert counts.came(1, 20), "gRPC may send a call again"
    assert counts.sent(2, 25) == Amount(1, 5) and counts.on_way == Amount(1, 5)


@pytest.mark.parametrize("said", [(1 << 40, 100), (3, 5)])
def test_counts_that_cannot_be_are_refused(said: tuple[int, int]) -> None:
    counts = CallCounts()
    counts.sent(2, 50)
    with pytest.raises(InvalidRequest, match="open a new stream"):
        counts.sent(*said)
    assert counts.on_way == Amount(2, 50)
