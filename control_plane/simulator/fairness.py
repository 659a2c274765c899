"""Which part of the workers' time each account had, and which part is fair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from control_plane.simulator.load import device_seconds
from control_plane.simulator.outcome import Answered
from control_plane.simulator.profiles import FleetProfile


def used_seconds(answers: Iterable[Answered], fleet: FleetProfile) -> dict[str, float]:
    """Return the worker-seconds of each account's requests, answers at full batches."""
    used: defaultdict[str, float] = defaultdict(float)
    for answer in answers:
        used[answer.request.account] += device_seconds(answer.request, answer.num_cached, fleet)
    return dict(used)


def shares(used: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of the whole; all 0 if there is none."""
    total = sum(used.values()) or 1.0
    return {account: each / total for account, each in used.items()}


def fair_parts(wanted: Mapping[str, float], given: float) -> dict[str, float]:
    """Divide by max-min fairness: each gets what it wants, at most an equal part of what the others leave."""
    left, parts = min(given, sum(wanted.values())), dict.fromkeys(wanted, 0.0)
    for index, account in enumerate(sorted(wanted, key=lambda each: wanted[each])):
        parts[account] = min(wanted[account], left / (len(wanted) - index))
        left -= parts[account]
    return parts
