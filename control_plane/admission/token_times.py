"""Predicts the time per output token at a worker with one more answer, from its load reports.

Two reports give a sample: answers that run, and time per token of each. A line through the samples, the older the
lighter, gives what one more answer adds.
"""

from __future__ import annotations

from dataclasses import dataclass

_OLD_WEIGHT = 0.8
_LEAST_GROWS = 1.01
"""The least time is forgotten slowly: by a percent with each report."""
_MIN_STEPS = 3.0
_MIN_VARIANCE = 0.5
"""Of the number of answers: below it, the samples do not tell what one more adds."""


@dataclass
class TokenTimes:
    """One worker's; milliseconds."""

    _weight: float = 0.0
    _num: float = 0.0
    _ms: float = 0.0
    _num_num: float = 0.0
    _num_ms: float = 0.0
    least_ms: float | None = None
    """About what a token takes if few answers run."""

    def add(self, num_running: float, num_steps: float, step_seconds: float, num_tokens: float) -> None:
        """Take in what a worker has done since its last report: on average so many answers ran."""
        if num_steps < _MIN_STEPS or num_tokens <= 0 or num_running <= 0:
            return
        token_ms = 1000.0 * step_seconds * num_running / num_tokens
        self._weight = _OLD_WEIGHT * self._weight + 1
        self._num = _OLD_WEIGHT * self._num + num_running
        self._ms = _OLD_WEIGHT * self._ms + token_ms
        self._num_num = _OLD_WEIGHT * self._num_num + num_running * num_running
        self._num_ms = _OLD_WEIGHT * self._num_ms + num_running * token_ms
        self.least_ms = token_ms if self.least_ms is None else min(token_ms, _LEAST_GROWS * self.least_ms)

    def predicted_ms(self, num_answers: int) -> float | None:
        """Return the time per token with so many answers; None: nothing is known."""
        if not self._weight:
            return None
        mean_num, mean_ms = self._num / self._weight, self._ms / self._weight
        variance = self._num_num / self._weight - mean_num * mean_num
        covariance = self._num_ms / self._weight - mean_num * mean_ms
        slope = max(0.0, covariance / variance) if variance > _MIN_VARIANCE else 0.0
        return max(0.0, mean_ms + slope * (num_answers - mean_num))

    def keeps(self, budget_ms: float, num_answers: int) -> bool:
        """Return whether so many answers are predicted to keep a budget.

        A budget that a few answers cannot keep is not the load's fault: then twice their time is the bound.
        """
        predicted = self.predicted_ms(num_answers)
        return predicted is None or predicted <= max(budget_ms, 2 * (self.least_ms or 0.0))
