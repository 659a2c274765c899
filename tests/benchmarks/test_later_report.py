"""A benchmark reads counters from reports that were made after its load."""

from __future__ import annotations

import pytest

from benchmarks.lib import later_report
from benchmarks.lib.later_report import LaterReport


class _Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_the_third_heartbeat_since_is_of_later_however_slowly_rows_are_read(
    delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(later_report, "time", clock)
    report, beats, found = LaterReport(), [99.9 + number for number in range(20)], 0.0
    while not found:
        clock.now += 0.2
        asked_at = clock.now  # what the gateway answers is of this moment, and read after a delay
        newest = max(beat for beat in beats if beat <= asked_at)
        clock.now += delay
        if report.is_in({"heartbeat_age_seconds": round(asked_at - newest, 2)}):
            found = newest
    assert found >= 102.9 - 0.01, "of 100.9, 101.9 and 102.9, the first two may be of before"
    assert found <= 107.0, "it does not wait for ever"
