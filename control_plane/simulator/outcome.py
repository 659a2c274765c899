"""What a simulated run shows: times of each request, and figures over all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.simulator.lines import Reason
from control_plane.simulator.traces import TraceRequest


@dataclass(frozen=True)
class Answered:
    """One request, as its client saw it; virtual seconds."""

    request: TraceRequest
    arrived_at: float
    first_token_at: float
    ended_at: float
    prefill: int | None
    decode: int
    num_cached: int
    """Prompt tokens that the worker that computed the prompt had or loaded."""
    predicted_cached: int
    hand_over_seconds: float | None
    """From prefill's first token until decode had the KV cache; None: it was not handed over."""
    num_preemptions: int
    num_attempts: int
    """Placements that were tried."""
    started_at: float = 0.0
    """When its workers took it."""

    @property
    def num_missing(self) -> int:
        """Return the prompt tokens that were computed."""
        return self.request.num_prompt_tokens - self.num_cached

    @property
    def ttft_seconds(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def tpot_seconds(self) -> float:
        """Seconds per output token after the first."""
        return (self.ended_at - self.first_token_at) / max(1, self.request.num_output_tokens - 1)


@dataclass(frozen=True)
class Refused:
    """One request that its gateway refused; virtual seconds."""

    request: TraceRequest
    arrived_at: float
    refused_at: float
    gateway: int
    reason: Reason
    ttft_seconds: float | None
    """What it would have had, had it alone been let wait: at the time when its turn would have come, what the request
    had that was let in then, with its own prompt. None: its turn would not have come in time."""
    tpot_seconds: float | None
    """Of that request."""


@dataclass(frozen=True)
class Budgets:
    """What a client waits at most."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.05

    def are_met(self, answer: Answered) -> bool:
        return answer.ttft_seconds <= self.ttft_seconds and answer.tpot_seconds <= self.tpot_seconds

    def would_be_met(self, refused: Refused) -> bool:
        """Return whether a refused request would have met both, had it been let wait."""
        ttft, tpot = refused.ttft_seconds, refused.tpot_seconds
        return ttft is not None and tpot is not None and ttft <= self.ttft_seconds and tpot <= self.tpot_seconds


def figures(
    answers: Sequence[Answered], budgets: Budgets, warm_up: float = 0.0, refused: Sequence[Refused] = ()
) -> dict[str, float]:
    """Return flat figures. `warm_up`: the share of requests, the earliest, that are left out: caches are cold.

    Times are those of answers; shares in budget are of all requests, unless they say otherwise. Rates are over the
    whole run: agents go on when they are answered, so whoever is quick with the first requests has longer for the rest.
    """
    together: list[Answered | Refused] = [*answers, *refused]
    everything = sorted(together, key=lambda each: each.arrived_at)
    every = everything[int(warm_up * len(everything)) :]
    counted = [each for each in every if isinstance(each, Answered)]
    turned_away = [each for each in every if isinstance(each, Refused)]
    if not counted:
        raise ValueError("every request was refused, so no figures" if turned_away else "no requests, so no figures")
    ttfts = sorted(answer.ttft_seconds for answer in counted)
    tpots = sorted(answer.tpot_seconds for answer in counted)
    num_prompt_tokens = sum(answer.request.num_prompt_tokens for answer in counted)
    seconds = max(1e-9, everything[-1].arrived_at - everything[0].arrived_at) * len(every) / len(everything)
    good = [answer for answer in counted if budgets.are_met(answer)]
    return {
        "num_requests": len(every),
        "requests_per_second": len(every) / seconds,
        "ttft_ms.p50": 1000 * _percentile(ttfts, 50),
        "ttft_ms.p99": 1000 * _percentile(ttfts, 99),
        "tpot_ms.p50": 1000 * _percentile(tpots, 50),
        "tpot_ms.p99": 1000 * _percentile(tpots, 99),
        "goodput_share": len(good) / len(every),
        "goodput_per_second": len(good) / seconds,
        "good_tokens_per_second": sum(answer.request.num_output_tokens for answer in good) / seconds,
        "refused_share": len(turned_away) / len(every),
        "accepted_met_share": len(good) / len(counted),
        "refused_would_share": sum(map(budgets.would_be_met, turned_away)) / max(1, len(turned_away)),
        "cached_share": sum(answer.num_cached for answer in counted) / num_prompt_tokens,
        "predicted_cached_share": sum(answer.predicted_cached for answer in counted) / num_prompt_tokens,
        "handed_over_share": sum(answer.prefill is not None for answer in counted) / len(counted),
        "num_preemptions": sum(answer.num_preemptions for answer in counted),
        "attempts_per_request": sum(answer.num_attempts for answer in counted) / len(counted),
        "busiest_decode": _busiest(Counter(answer.decode for answer in counted)),
        "busiest_prefill": _busiest(Counter(each.prefill for each in counted if each.prefill is not None)),
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _busiest(counts: Mapping[int, int]) -> float:
    """Return the most requests of one worker over the mean of those that had any; 0 without any."""
    return max(counts.values()) * len(counts) / sum(counts.values()) if counts else 0.0
