"""What runs in one step?"""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.request import Request


@dataclass(frozen=True)
class ScheduledRun:
    """Tokens [first_position, first_position + num_tokens) of one request, computed in one step."""

    request: Request
    first_position: int
    num_tokens: int
    samples: bool
    """The run ends with the last known token: one token per choice seed follows it."""


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work; a request appears in it at most once."""

    step: int
    runs: tuple[ScheduledRun, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


class Batch:
    """A step while it is put together, within its two limits."""

    def __init__(self, max_num_tokens: int, max_num_seqs: int) -> None:
        self.runs: dict[Request, ScheduledRun] = {}
        self._num_tokens_left = max_num_tokens
        self._max_num_seqs = max_num_seqs

    @property
    def is_full(self) -> bool:
        return not self._num_tokens_left or len(self.runs) >= self._max_num_seqs

    def add(self, request: Request) -> None:
        """Run as many of a request's uncomputed tokens as the budget allows."""
        num_tokens = min(request.num_tokens_to_compute, self._num_tokens_left)
        samples = num_tokens == request.num_tokens_to_compute
        self.runs[request] = ScheduledRun(request, request.num_computed_tokens, num_tokens, samples)
        self._num_tokens_left -= num_tokens

    def remove(self, request: Request) -> None:
        """Give a request's tokens back to the budget, if it has any in this step."""
        if run := self.runs.pop(request, None):
            self._num_tokens_left += run.num_tokens
