"""What a route was compared to, in the form that an explanation shows.

The router keeps estimates, which it has anyway; they become an explanation once the request ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from control_plane.explain.explanation import CachedTokens, Candidate, HandOverExplanation, RouteExplanation
from control_plane.routing.cost_model import PrefillEstimate
from control_plane.routing.hand_overs import HandOverCost, Pair, Reader, shown

MAX_COMPARED = 8
"""Workers of each role."""


class ComparedDecode(msgspec.Struct, frozen=True, gc=False):
    """A decode worker, compared."""

    cost: tuple[bool, float]
    """Whether its pool seems full, and the predicted milliseconds of prompt and answer."""
    estimate: PrefillEstimate
    local_ms: float
    """Until the worker would have computed the prompt itself, the delay of its other answers included."""
    load: float
    """The share of its pool's tokens that would be in flight with this request."""
    is_handed_over: bool
    prefill: PrefillEstimate | None
    """The best one for this decode worker; None: the prompt cannot be handed over there."""
    hand_over_ms: float
    """Until this worker would have the cache from there."""


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """The workers that a request might have gone to: the soonest of prefill, the first of decode in their order."""

    prefills: Sequence[PrefillEstimate] = ()
    pairs: Sequence[Pair] = ()
    """Of the hosts of these and that of the chosen decode worker, as they were."""
    decodes: Sequence[ComparedDecode] = ()
    num_tokens: int = 0
    """Of the prompt."""
    reader: Reader | None = None
    """The chosen decode worker; None: nothing was compared."""
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
        for estimate, pair in zip(self.prefills, self.pairs, strict=True):
            hand_over = self._hand_over(estimate, pair)
            yield Candidate(
                "prefill",
                estimate.worker.worker_id,
                estimate.total_ms + hand_over.ms,
                estimate.queue_ms,
                estimate.load_ms,
                estimate.compute_ms,
                hand_over.ms,
                CachedTokens(estimate.cached.own, estimate.cached.host, estimate.cached.remote),
                is_chosen=estimate.worker.worker_id == chosen,
                hand_over=HandOverExplanation(
                    hand_over.from_host,
                    hand_over.to_host,
                    hand_over.num_bytes,
                    hand_over.fixed_ms,
                    hand_over.transfer_ms,
                    hand_over.wait_ms,
                    1000.0 / hand_over.ms_per_byte,
                ),
            )

    def _hand_over(self, estimate: PrefillEstimate, pair: Pair) -> HandOverCost:
        assert self.reader is not None, "prefill workers are compared for a decode worker"
        figures, num_computed = estimate.worker.figures, estimate.num_computed_tokens
        shows = shown(figures, self.num_tokens, num_computed, estimate.compute_ms, estimate.total_ms)
        return self.reader.cost(shows, figures.host_id, pair)

    def _decode_candidates(self, chosen: str) -> Iterator[Candidate]:
        for compared in self.decodes:
            estimate = compared.estimate
            yield Candidate(
                "decode",
                estimate.worker.worker_id,
                compared.local_ms,
                estimate.queue_ms,
                estimate.load_ms,
                estimate.compute_ms,
                None,
                CachedTokens(estimate.cached.own, estimate.cached.host, estimate.cached.remote),
                compared.load,
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
