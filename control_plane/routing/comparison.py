"""What a route was compared to, in the form that an explanation shows.

The router keeps estimates, which it has anyway; they become an explanation once the request ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from control_plane.explain.explanation import CachedTokens, Candidate, RouteExplanation
from control_plane.routing.cost_model import PrefillEstimate

MAX_COMPARED = 8
"""Workers of each role."""


class ComparedPrefill(NamedTuple):
    estimate: PrefillEstimate
    hand_over_ms: float
    """Until decode would have the cache."""


class ComparedDecode(NamedTuple):
    estimate: PrefillEstimate
    local_ms: float
    """Until this worker would have computed the prompt itself, the delay of its other answers included."""
    load: float
    """The share of its pool's tokens that would be in flight."""


@dataclass(frozen=True)
class Comparison:
    """The workers that a request might have gone to: the soonest of prefill, the first of decode in their order."""

    prefills: Sequence[ComparedPrefill] = ()
    decodes: Sequence[ComparedDecode] = ()
    may_hand_over: bool = True

    def explained(
        self, prefill_id: str, decode_id: str, reason: str, predicted_ms: Mapping[str, float]
    ) -> RouteExplanation:
        """Return the decision for these workers; `prefill_id` is "" if the decode worker computes the prompt."""
        candidates = [*self._prefill_candidates(prefill_id), *self._decode_candidates(decode_id)]
        return RouteExplanation(
            mode="handed_over" if prefill_id else "local",
            prefill=prefill_id,
            decode=decode_id,
            reason=reason,
            predicted_ms=predicted_ms,
            candidates=candidates,
            runner_up=self._runner_up(candidates, prefill_id, decode_id),
        )

    def _prefill_candidates(self, chosen: str) -> Iterator[Candidate]:
        for estimate, hand_over_ms in self.prefills:
            yield Candidate(
                "prefill",
                estimate.worker.worker_id,
                hand_over_ms,
                estimate.queue_ms,
                estimate.load_ms,
                estimate.compute_ms,
                hand_over_ms - estimate.total_ms,
                CachedTokens(estimate.cached.own, estimate.cached.host, estimate.cached.remote),
                is_chosen=estimate.worker.worker_id == chosen,
            )

    def _decode_candidates(self, chosen: str) -> Iterator[Candidate]:
        for estimate, local_ms, load in self.decodes:
            yield Candidate(
                "decode",
                estimate.worker.worker_id,
                local_ms,
                estimate.queue_ms,
                estimate.load_ms,
                estimate.compute_ms,
                None,
                CachedTokens(estimate.cached.own, estimate.cached.host, estimate.cached.remote),
                load,
                is_chosen=estimate.worker.worker_id == chosen,
            )

    def _runner_up(self, candidates: Sequence[Candidate], prefill_id: str, decode_id: str) -> Candidate | None:
        """Return the soonest of the other ways to compute the prompt: at a prefill worker, or at a decode worker."""
        chosen = ("prefill", prefill_id) if prefill_id else ("decode", decode_id)
        others = [
            candidate
            for candidate in candidates
            if (candidate.role, candidate.worker) != chosen and (candidate.role == "decode" or self.may_hand_over)
        ]
        best = min(others, key=lambda candidate: candidate.predicted_ms, default=None)
        return None if best is None else replace(best, is_chosen=False)


NOTHING_COMPARED = Comparison()
