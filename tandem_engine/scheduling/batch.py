"""What runs in one step?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig


class ScheduledRun(NamedTuple):
    """Known tokens [first_position, first_position + num_tokens) of one request, and drafts, computed in one step."""

    request: Request
    first_position: int
    num_tokens: int
    samples: bool
    """The run ends with the last known token: one token per choice seed follows it."""
    draft_tokens: tuple[int, ...] = ()
    """Guesses of the tokens that follow, computed behind the known ones: as many of them are drawn as were right, and
    one more. Of answers only."""

    @property
    def end(self) -> int:
        """The position behind the last known token."""
        return self.first_position + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether an answer goes on with it, as `Request.is_decoding` says before."""
        return self.samples and self.num_tokens == 1 and self.first_position > 0


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work; a request appears in it at most once."""

    step: int
    runs: tuple[ScheduledRun, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens + len(run.draft_tokens) for run in self.runs)


PromptLimit = Callable[["Batch", int, int], int]
"""How many of a prompt's tokens may join a batch, given the first one's position and how many there are; 0: none."""


class Batch:
    """A step while it is put together, within its limits: tokens, requests, and what `prompt_limit` says."""

    def __init__(self, config: SchedulerConfig, prompt_limit: PromptLimit, is_ready: Callable[[Request], bool]) -> None:
        """`is_ready` tells of a request whether its next token can be drawn without waiting for anything."""
        self.runs: dict[Request, ScheduledRun] = {}
        self.num_tokens_left = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._prompt_limit = prompt_limit
        self._is_ready = is_ready
        self._unready: list[Request] = []

    @property
    def is_full(self) -> bool:
        return not self.num_tokens_left or len(self.runs) >= self._max_num_seqs

    @property
    def takes_prompts(self) -> bool:
        """Whether the first tokens of a prompt could join."""
        return not self.is_full and self._prompt_limit(self, 0, self.num_tokens_left) > 0

    def add(self, request: Request) -> None:
        """Run as many of a request's uncomputed tokens as the limits allow, if they allow any.

        One that is not ready to be drawn from runs with `add_unready`.
        """
        num_tokens = self._num_fitting(request)
        if num_tokens == request.num_tokens_to_compute and not self._is_ready(request):
            self._unready.append(request)
        else:
            self._add(request, num_tokens)

    def add_unready(self) -> None:
        """Run what is left to compute of requests that are not ready, but for their last token if others run.

        Where nobody else runs the first of them draws, and is waited for.
        """
        for request in self._unready:
            if len(self.runs) < self._max_num_seqs:
                num_tokens = request.num_tokens_to_compute - bool(self.runs)
                self._add(request, min(num_tokens, self._num_fitting(request)))

    def add_drafts(self, request: Request, draft_tokens: tuple[int, ...]) -> None:
        """Let guesses run behind a request's last known token, which is in this step; there must be room for them."""
        assert len(draft_tokens) <= self.num_tokens_left, "more drafts than the budget has room for"
        run = self.runs[request]
        self.runs[request] = ScheduledRun(request, run.first_position, run.num_tokens, run.samples, draft_tokens)
        self.num_tokens_left -= len(draft_tokens)

    def remove(self, request: Request) -> None:
        """Give a request's tokens back to the budget, if it has any in this step."""
        if run := self.runs.pop(request, None):
            self.num_tokens_left += run.num_tokens + len(run.draft_tokens)
        if request in self._unready:
            self._unready.remove(request)

    def _num_fitting(self, request: Request) -> int:
        num_tokens = min(request.num_tokens_to_compute, self.num_tokens_left)
        if request.is_decoding:
            return num_tokens
        return self._prompt_limit(self, request.num_computed_tokens, num_tokens)

    def _add(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            samples = num_tokens == request.num_tokens_to_compute
            self.runs[request] = ScheduledRun(request, request.num_computed_tokens, num_tokens, samples)
            self.num_tokens_left -= num_tokens
