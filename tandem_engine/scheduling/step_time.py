"""How long will a step take?

    seconds = c0 + c1 * answers + c2 * keys they attend to + c3 * prompt tokens + c4 * pairs of these and their keys
                 + c5 * draft tokens

The coefficients, none below zero, are fitted to the steps that were taken: least squares over moments that fade (each
step weighs 1/32 more than the one before), those of steps with prompt tokens, with drafts and with neither apart, so
that hours of answers do not wash out what a prompt or a draft costs. Errors are relative to what a step took: so short
steps count as much as long ones, and one that took k times too long (another process had the core) pulls with a weight
of 1 / k^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem_engine.scheduling.batch import ScheduledRun

_FADE = 31 / 32
_SCALES = (1.0, 8.0, 8192.0, 64.0, 65536.0, 8.0)  # of the features, so that all are about as large
_REFIT_AFTER = 8  # steps; a fit costs some 50 us
_LEAST_DRAFTED = 4  # steps
_MOST_SPREAD = 0.15


@dataclass(frozen=True)
class StepWork:
    """What a step computes."""

    num_decodes: int = 0
    num_decode_keys: int = 0
    """Tokens that answers attend to."""
    num_prompt_tokens: int = 0
    num_prompt_pairs: float = 0.0
    """Pairs of a prompt token and one that it attends to."""
    num_draft_tokens: int = 0
    """Of answers, besides their known tokens. Their keys are not counted: they are read once for all rows of a run."""


def visible_keys(position: int, window: int | None) -> int:
    """Count the tokens before `position` that its token attends to."""
    return position if window is None else min(position, window)


def prompt_pairs(num_keys: int, num_tokens: float) -> float:
    """Return the pairs of `num_tokens` prompt tokens in a row of which the first attends to `num_keys` before it."""
    return num_tokens * (num_keys + num_tokens / 2)


def work_of(runs: Iterable[ScheduledRun], window: int | None = None) -> StepWork:
    """Return what the runs of a step add up to."""
    num_decodes = num_decode_keys = num_prompt_tokens = num_draft_tokens = 0
    pairs = 0.0
    for run in runs:
        num_keys = visible_keys(run.first_position, window)
        if run.is_decode:
            num_decodes += 1
            num_decode_keys += num_keys
            num_draft_tokens += len(run.draft_tokens)
        else:
            num_prompt_tokens += run.num_tokens
            pairs += prompt_pairs(num_keys, run.num_tokens)
    return StepWork(num_decodes, num_decode_keys, num_prompt_tokens, pairs, num_draft_tokens)


class StepTimeModel:
    """Learns from `observe`; what it predicts is in seconds, None where nothing like it was measured yet."""

    def __init__(self) -> None:
        self._answers = _Moments()
        self._prompts = _Moments()
        self._drafted = _Moments()
        self._coefficients = [0.0] * len(_SCALES)
        self._num_steps = 0
        self._num_unfitted = 0
        self._spread = 0.05

    @property
    def spread(self) -> float:
        """The mean relative error of late predictions, as far as it is below 15 %."""
        return min(self._spread, _MOST_SPREAD)

    @property
    def knows_prompts(self) -> bool:
        return self._prompts.num_rows > 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take in what a step took."""
        if seconds <= 0:
            return
        features = _features(work)
        if self._num_steps >= _REFIT_AFTER:
            error = abs(1 - _dot(self._fitted(), features) / seconds)
            self._spread += (min(error, 4 * self._spread + 0.02) - self._spread) / 16
        self._moments_of(work).add([feature / seconds for feature in features])
        self._num_steps += 1
        self._num_unfitted += 1

    def predict(self, work: StepWork) -> float | None:
        """Return the seconds a step should take."""
        if not self._num_steps:
            return None
        return _dot(self._fitted(), _features(work))

    def draft_seconds(self) -> float | None:
        """Return what each draft adds to a step; None before a few had some: one alone may have been disturbed."""
        return self._fitted()[5] / _SCALES[5] if self._drafted.num_rows >= _LEAST_DRAFTED else None

    def prompt_seconds(self, first_position: int, num_tokens: int, window: int | None = None) -> float | None:
        """Return what prompt tokens add to the steps they run in."""
        if not self.knows_prompts:
            return None
        pairs = prompt_pairs(visible_keys(first_position, window), num_tokens)
        coefficients = self._fitted()
        return coefficients[3] * num_tokens / _SCALES[3] + coefficients[4] * pairs / _SCALES[4]

    def prompt_tokens_within(self, seconds: float, first_position: int, window: int | None = None) -> int:
        """Return how many prompt tokens add at most `seconds` to a step; 0 while that is not known."""
        if not self.knows_prompts or seconds <= 0:
            return 0
        coefficients = self._fitted()
        per_token, per_pair = coefficients[3] / _SCALES[3], coefficients[4] / _SCALES[4]
        linear = per_token + per_pair * visible_keys(first_position, window)
        # per_pair / 2 * n^2 + linear * n <= seconds, in the form that does not cancel
        root = linear + math.sqrt(linear * linear + 2 * per_pair * seconds)
        return int(2 * seconds / root) if root > 2e-9 * seconds else 1_000_000_000

    def _moments_of(self, work: StepWork) -> _Moments:
        if work.num_prompt_tokens:
            return self._prompts
        return self._drafted if work.num_draft_tokens else self._answers

    def _fitted(self) -> list[float]:
        if self._num_unfitted and (self._num_steps < 4 * _REFIT_AFTER or self._num_unfitted >= _REFIT_AFTER):
            self._coefficients = _fit(self._answers, self._prompts, self._drafted)
            self._num_unfitted = 0
        return self._coefficients


class _Moments:
    """Fading sums over rows x of features / seconds: of x x^T and of x, for the coefficients with x . c = 1."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self.products = [[0.0] * size for _ in range(size)]
        self.sums = [0.0] * size
        self.num_rows = 0

    def add(self, row: Sequence[float]) -> None:
        self.num_rows += 1
        self.sums = [old * _FADE + x for old, x in zip(self.sums, row, strict=True)]
        for line, x in zip(self.products, row, strict=True):
            for column, y in enumerate(row):
                line[column] = line[column] * _FADE + x * y


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.num_decodes / _SCALES[1],
        work.num_decode_keys / _SCALES[2],
        work.num_prompt_tokens / _SCALES[3],
        work.num_prompt_pairs / _SCALES[4],
        work.num_draft_tokens / _SCALES[5],
    )


def _fit(*moments: _Moments) -> list[float]:
    """Return the coefficients; one that would be negative is left out, and the others fitted again."""
    size = len(_SCALES)
    products = [[sum(m.products[i][j] for m in moments) for j in range(size)] for i in range(size)]
    sums = [sum(m.sums[i] for m in moments) for i in range(size)]
    ridge = 1e-7 * sum(products[i][i] for i in range(size))  # splits what cannot be told apart yet
    kept = [i for i in range(size) if products[i][i] > 0]  # else: nothing of it was in any step
    while True:
        matrix = [[products[i][j] + (ridge if i == j else 0.0) for j in kept] for i in kept]
        solution = _solve(matrix, [sums[i] for i in kept])
        lowest = min(range(len(kept)), key=solution.__getitem__)
        if solution[lowest] >= 0 or len(kept) == 1:
            break
        del kept[lowest]
    coefficients = [0.0] * size
    for index, value in zip(kept, solution, strict=True):
        coefficients[index] = max(0.0, value)
    return coefficients


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive definite system by elimination, in place."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            right[row] -= factor * right[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (right[row] - known) / matrix[row][row]
    return solution


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))
