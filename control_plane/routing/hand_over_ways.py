"""Finds the best prefill worker for each decode worker: the best one of all, unless another host is nearer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from control_plane.fleet.registry import Worker
from control_plane.routing.cost_model import CostModel, PrefillEstimate
from control_plane.routing.hand_overs import Shown


class _Way(msgspec.Struct, frozen=True, gc=False):
    total_ms: float
    """Until the first token."""
    host_id: str
    prefill: PrefillEstimate
    shown: Shown


class HandOverWays:
    """The hand-overs of one request: from the best prefill worker, and from the soonest one of each other host."""

    def __init__(
        self,
        costs: CostModel,
        num_tokens: int,
        best: PrefillEstimate,
        ordered: Sequence[tuple[float, str, PrefillEstimate]],
        slack: float,
        slack_ms: float,
    ) -> None:
        """`num_tokens`: of the prompt. `ordered`: by their milliseconds, which come first.

        `slack`: how many times as soon as the best one another host must have the cache, and sooner by `slack_ms`.
        """
        self._costs, self._num_tokens, self._slack, self._slack_ms = costs, num_tokens, slack, slack_ms
        self._best = self._way(best.total_ms, best)
        self._ordered = ordered
        self._others: list[_Way] = []
        """Of the workers that were looked at, the soonest of each host."""
        self._hosts = {self._best.host_id}
        """Of the best one and the others."""
        self._num_seen = 0
        self._found: dict[tuple[str, float, int], tuple[PrefillEstimate, float]] = {}
        """By what decides: the candidates are often of one host, and have as much of the prompt."""

    def best(self, decode: PrefillEstimate) -> tuple[PrefillEstimate, float]:
        """Return the prefill worker for a decode worker, and the milliseconds until that has the cache."""
        figures, num_own = decode.worker.figures, decode.cached.own
        key = figures.host_id, figures.bytes_per_token, num_own
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._best_for(decode.worker, num_own)
        return found

    def _best_for(self, decode: Worker, num_own: int) -> tuple[PrefillEstimate, float]:
        hand_overs, best = self._costs.hand_overs, self._best
        reader, pair = hand_overs.reader(decode, self._num_tokens, num_own), hand_overs.pair
        to_host = reader.host_id
        best_ms = best.total_ms + reader.ms(best.shown, best.host_id, pair(best.host_id, to_host))
        limit_ms = min(best_ms / self._slack, best_ms - self._slack_ms)
        for other in self._sooner_than(limit_ms):
            if other.total_ms >= limit_ms:
                break
            ms = other.total_ms + reader.ms(other.shown, other.host_id, pair(other.host_id, to_host))
            if ms < limit_ms:
                best, best_ms, limit_ms = other, ms, ms
        return best.prefill, best_ms

    def _sooner_than(self, limit_ms: float) -> Sequence[_Way]:
        """Return the ways from other hosts, in order, with at least those whose first token is sooner."""
        ordered = self._ordered
        while self._num_seen < len(ordered) and ordered[self._num_seen][0] < limit_ms:
            total_ms, _, prefill = ordered[self._num_seen]
            host_id = prefill.worker.figures.host_id
            if host_id not in self._hosts:
                self._hosts.add(host_id)
                self._others.append(self._way(total_ms, prefill))
            self._num_seen += 1
        return self._others

    def _way(self, total_ms: float, prefill: PrefillEstimate) -> _Way:
        shown = self._costs.shown(prefill, self._num_tokens)
        return _Way(total_ms, prefill.worker.figures.host_id, prefill, shown)
