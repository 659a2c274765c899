"""Writes what is known of a request's durations as a Server-Timing header.

https://www.w3.org/TR/server-timing/: names, and durations in milliseconds. `total` is the time since the head.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from control_plane.explain.assembly import segments_of, shared_segments
from control_plane.explain.explanation import Segment
from control_plane.explain.journal import Journal
from control_plane.explain.timeline import Timeline


def server_timing(timeline: Timeline) -> str:
    """Return the value of the header for an HTTP request so far; of several prompts, the first one counts."""
    total_ms = 1000 * (time.perf_counter() - timeline.started)
    durations = _durations(_segments(timeline))
    return ", ".join([*(f"{name};dur={ms:.3f}" for name, ms in durations.items()), f"total;dur={total_ms:.3f}"])


def _segments(timeline: Timeline) -> Iterable[Segment]:
    part = timeline.parts[0] if timeline.parts else None
    if isinstance(part, Journal):
        return segments_of(part) if part.explanation is None else part.explanation.segments
    return shared_segments(timeline)


def _durations(segments: Iterable[Segment]) -> dict[str, float]:
    durations: dict[str, float] = {}
    for segment in segments:
        durations[segment.name] = durations.get(segment.name, 0.0) + segment.duration_ms
    return durations
