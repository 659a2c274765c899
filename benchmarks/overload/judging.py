"""Figures of a load: goodput, budgets, acceptance by length, parts of accounts, refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.lib.stats import percentile
from benchmarks.overload.asking import Asked
from control_plane.simulator.fairness import fair_parts, shares
from control_plane.simulator.load import device_seconds
from control_plane.simulator.outcome import Budgets
from control_plane.simulator.profiles import FleetProfile

NUM_PARTS = 10
"""Deciles."""


@dataclass(frozen=True)
class Load:
    """The requests of one load. What came in the first `warm_seconds` of a pass does not count, nor what ended then."""

    times: float
    """Of the capacity."""
    seconds: float
    warm_seconds: float
    asked: Sequence[Asked]
    budgets: Budgets
    profile: FleetProfile
    would: Collection[int] = ()
    """Requests that would have met both budgets in the simulator, had all been accepted."""
    cpu_seconds: float = 0.0
    """Of the gateways, from the beginning until the last request ended."""
    simulated: Mapping[str, float] = field(default_factory=dict)
    starts: Sequence[float] = (0.0,)
    """When its passes began."""

    @property
    def counted_seconds(self) -> float:
        """Of all passes."""
        return len(self.starts) * (self.seconds - self.warm_seconds)

    @property
    def counted(self) -> list[Asked]:
        """Requests that came in the window of a pass."""
        return [each for each in self.asked if self._counts(each.request.arrival)]

    def _counts(self, at: float) -> bool:
        return any(start + self.warm_seconds <= at <= start + self.seconds for start in self.starts)

    @property
    def accepted(self) -> list[Asked]:
        return [each for each in self.counted if each.status == 200]

    @property
    def refused(self) -> list[Asked]:
        return [each for each in self.counted if each.status == 429]

    @property
    def num_failed(self) -> int:
        """Requests that were neither answered to their end nor refused with 429."""
        return sum(each.status != 429 and each.ended_at is None for each in self.asked)

    def has_met(self, asked: Asked) -> bool:
        ttft, tpot = asked.ttft_seconds, asked.tpot_seconds
        if ttft is None or tpot is None:
            return False
        return ttft <= self.budgets.ttft_seconds and tpot <= self.budgets.tpot_seconds

    @property
    def met_share(self) -> float:
        """Of the accepted."""
        return sum(map(self.has_met, self.accepted)) / max(1, len(self.accepted))

    @property
    def would_share(self) -> float:
        """Of the refused: what would have met both budgets, had all been accepted."""
        return sum(each.request.number in self.would for each in self.refused) / max(1, len(self.refused))

    @property
    def good(self) -> list[Asked]:
        """Answers that ended in the window, and met both budgets."""
        return [each for each in self._ended if self.has_met(each)]

    @property
    def _ended(self) -> list[Asked]:
        return [each for each in self.asked if each.ended_at is not None and self._counts(each.ended_at)]

    @property
    def goodput(self) -> float:
        """Requests per second."""
        return len(self.good) / self.counted_seconds

    @property
    def good_tokens(self) -> float:
        """Tokens per second."""
        return sum(each.num_tokens for each in self.good) / self.counted_seconds

    @property
    def ttft_p95(self) -> float:
        waits = [each.ttft_seconds for each in self.accepted if each.ttft_seconds is not None]
        return percentile(waits, 95) if waits else 0.0

    @property
    def refusal_ms_p99(self) -> float:
        times = [each.refused_after for each in self.refused if each.refused_after is not None]
        return 1000 * percentile(times, 99) if times else 0.0

    @property
    def late_refusals(self) -> float:
        """Part of the refused that had waited: more than a second."""
        return sum((each.refused_after or 0.0) > 1.0 for each in self.refused) / max(1, len(self.refused))

    # ------------------------------------------------------------------------------------------------ who had how much

    @property
    def account_shares(self) -> dict[str, float]:
        """Each account's part of the workers' time, by answers that ended in the window."""
        return shares(self._seconds_by_account(self._ended))

    @property
    def fair_shares(self) -> dict[str, float]:
        """Return the parts that max-min fairness gives, of what was asked for in the window and what was served."""
        wanted = self._seconds_by_account(self.counted)
        given = sum(self._seconds_by_account(self._ended).values())
        return shares(fair_parts(wanted, given))

    @property
    def unfairness(self) -> float:
        """How far the account that is farthest off is from its fair part."""
        had, fair = self.account_shares, self.fair_shares
        return max((abs(had.get(account, 0.0) / part - 1) for account, part in fair.items() if part), default=0.0)

    def _seconds_by_account(self, asked: Sequence[Asked]) -> dict[str, float]:
        used: dict[str, float] = {}
        for each in asked:
            name = each.request.account
            used[name] = used.get(name, 0.0) + device_seconds(each.request, 0, self.profile)
        return used


def together(passes: Sequence[Load]) -> Load:
    """Return one load of several passes of it: their times follow each other."""
    length = 1.0 + max((each.ended_at or each.at for load in passes for each in load.asked), default=0.0)
    length = max(length, passes[0].seconds + 1.0)
    num_numbers = 1 + max((each.request.number for load in passes for each in load.asked), default=0)
    starts = [number * length for number in range(len(passes))]
    asked = [
        _later(each, start, number * num_numbers)
        for number, (load, start) in enumerate(zip(passes, starts, strict=True))
        for each in load.asked
    ]
    would = {number * num_numbers + each for number, load in enumerate(passes) for each in load.would}
    simulated = {name: fmean(load.simulated[name] for load in passes) for name in passes[0].simulated}
    cpu_seconds = sum(load.cpu_seconds for load in passes)
    return replace(
        passes[0], asked=asked, would=would, cpu_seconds=cpu_seconds, simulated=simulated, starts=tuple(starts)
    )


def _later(asked: Asked, seconds: float, numbers: int) -> Asked:
    request = replace(asked.request, number=asked.request.number + numbers, arrival=asked.request.arrival + seconds)
    first_at = None if asked.first_at is None else asked.first_at + seconds
    ended_at = None if asked.ended_at is None else asked.ended_at + seconds
    return replace(asked, request=request, at=asked.at + seconds, first_at=first_at, ended_at=ended_at)


def acceptance_by_length(loads: Sequence[Load]) -> list[tuple[int, float, int]]:
    """Return for each decile of length (prompt and answer): its longest, its acceptance over that of all, its accepted.

    Over several loads, acceptance is the accepted over what is expected if length does not matter: for each request the
    accepted part of its own load.
    """
    counted = []
    for load in loads:
        of_load = load.counted
        part_accepted = sum(each.status == 200 for each in of_load) / max(1, len(of_load))
        counted += [(_length(each), each.status == 200, part_accepted) for each in of_load]
    counted.sort(key=lambda each: each[0])
    rows = []
    for part in range(NUM_PARTS):
        chosen = counted[part * len(counted) // NUM_PARTS : (part + 1) * len(counted) // NUM_PARTS]
        if chosen:
            num_accepted, num_expected = sum(each[1] for each in chosen), sum(each[2] for each in chosen)
            rows.append((chosen[-1][0], num_accepted / num_expected if num_expected else 0.0, num_accepted))
    return rows


def _length(asked: Asked) -> int:
    return asked.request.num_prompt_tokens + asked.request.num_output_tokens
