"""Windows, durations and limits of the rules: those of production, and short ones for tests with real processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Burn:
    """One pair of windows of a burn-rate alert (The Site Reliability Workbook, chapter 5).

    The alert fires while the error budget burns `factor` times as fast as its objective permits, in both windows. The
    short window ends the alert soon after the cause has ended.
    """

    name: str
    short: str
    long: str
    factor: float
    severity: str


@dataclass(frozen=True)
class Pace:
    """Durations are in Prometheus' form ("5m"). A `lasts_` is how long a condition holds before its alert fires."""

    burns: tuple[Burn, ...]
    window: str
    """Of rates and percentiles of current figures."""
    event_window: str
    """Events younger than this keep their alert firing."""
    memory: str
    """How far back, before the event window, a series is looked for: then it is not new."""
    lasts: str
    """Of conditions that may pass by themselves."""
    lasts_briefly: str
    """Of conditions under which requests fail."""
    ttft_seconds: float
    """A first token later than this is late."""
    min_requests: int
    """Requests in the window that a share or a percentile needs."""
    late_turns: float
    """Share of an event loop's turns that may be late."""
    prediction_factor: float
    """How far apart predicted and actual TTFT may be."""
    max_wait_seconds: float
    """How long 95 % of the requests may wait in the queue at most."""
    max_queue_length: int
    max_migrations: int
    """Migrations per event window that are no alert."""
    certificate_seconds: int
    """A certificate with less left expires soon: its renewal is overdue."""


PRODUCTION = Pace(
    burns=(Burn("fast", "5m", "1h", 14.4, "critical"), Burn("slow", "30m", "6h", 6.0, "warning")),
    window="5m",
    event_window="15m",
    memory="6h",
    lasts="5m",
    lasts_briefly="1m",
    ttft_seconds=2.0,
    min_requests=20,
    late_turns=0.01,
    prediction_factor=2.0,
    max_wait_seconds=1.0,
    max_queue_length=64,
    max_migrations=10,
    certificate_seconds=6 * 3600,
)
"""Certificates of Tandem's own authority are valid for a day and are renewed after half of it."""

SHORT = Pace(
    burns=(Burn("fast", "1s", "2s", 14.4, "critical"), Burn("slow", "2s", "3s", 6.0, "warning")),
    window="2s",
    event_window="4s",
    memory="2m",
    lasts="400ms",
    lasts_briefly="200ms",
    ttft_seconds=0.4,
    min_requests=4,
    late_turns=0.05,
    prediction_factor=5.0,
    max_wait_seconds=0.3,
    max_queue_length=4,
    max_migrations=0,
    certificate_seconds=40,
)
"""For a Prometheus that scrapes and evaluates every 0.2 s, and processes that share few cores with other work."""
