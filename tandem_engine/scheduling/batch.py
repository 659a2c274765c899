"""Holds the work of one step, and builds it within the step's limits."""

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
    """Drafts of the tokens that follow, computed behind the known tokens; only for answers. The step samples every
    draft that is right, and one more token."""

    @property
    def end(self) -> int:
        """The position behind the last known token."""
        return self.first_position + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the run continues an answer; `Request.is_decoding` is the same before the run."""
        return self.samples and self.num_tokens == 1 and self.first_position > 0

    @property
    def is_answer(self) -> bool:
        """Whether the run may have drafts: a decode, but not the last token of a prefill request's prompt."""
        return self.samples and self.num_tokens == 1 and self.first_position > 0 and self.request.mode != "prefill"


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work; a request appears in it at most once."""

    step: int
    runs: tuple[ScheduledRun, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens + len(run.draft_tokens) for run in self.runs)


class Batch:
    """A step under construction. Its limits: tokens, requests, and prompt tokens once the step has a decode.

    The last limit keeps the time between two tokens of an answer short. Attention takes time in proportion to the
    context, so prompt tokens times their contexts are limited too. How a prompt is cut changes no token (law 3).
    """

    def __init__(self, config: SchedulerConfig, is_ready: Callable[[Request], bool]) -> None:
        """`is_ready` returns whether a request's next token can be sampled without waiting."""
        self.runs: dict[Request, ScheduledRun] = {}
        self.num_tokens_left = config.max_num_batched_tokens
        self.num_decodes = 0
        self._num_prefill_tokens = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_prefill_tokens_with_decodes = config.max_prefill_tokens_with_decodes
        self._prefill_context = 0  # tokens times the length of their contexts
        self._max_prefill_context_with_decodes = config.max_prefill_context_with_decodes
        self._is_ready = is_ready
        self._unready: list[Request] = []

    @property
    def is_full(self) -> bool:
        return not self.num_tokens_left or len(self.runs) >= self._max_num_seqs

    @property
    def accepts_prompts(self) -> bool:
        """Whether the first tokens of a prompt could join."""
        return not self.is_full and self._num_prefill_tokens_left > 0

    def add(self, request: Request) -> None:
        """Run as many of a request's uncomputed tokens as the limits allow, if they allow any.

        A request whose next token is not ready to be sampled runs with `add_unready`.
        """
        num_tokens = self._num_fitting(request)
        if num_tokens == request.num_tokens_to_compute and not self._is_ready(request):
            self._unready.append(request)
        else:
            self._add(request, num_tokens)

    def add_unready(self) -> None:
        """Run the tokens of requests that are not ready; their last token waits while others run.

        If nobody else runs, the first of them samples, and the step waits for it.
        """
        for request in self._unready:
            if len(self.runs) < self._max_num_seqs:
                num_tokens = request.num_tokens_to_compute - bool(self.runs)
                self._add(request, min(num_tokens, self._num_fitting(request)))

    def add_drafts(self, request: Request, draft_tokens: tuple[int, ...]) -> None:
        """Add drafts behind a request's last known token, which is in this step; there must be room for them."""
        assert len(draft_tokens) <= self.num_tokens_left, "more drafts than the budget has room for"
        run = self.runs[request]
        self.runs[request] = ScheduledRun(request, run.first_position, run.num_tokens, run.samples, draft_tokens)
        self.num_tokens_left -= len(draft_tokens)

    def remove(self, request: Request) -> None:
        """Remove a request and give its tokens back to the limits."""
        if run := self.runs.pop(request, None):
            self.num_tokens_left += run.num_tokens + len(run.draft_tokens)
            self._count(run, -1)
        if request in self._unready:
            self._unready.remove(request)

    @property
    def _num_prefill_tokens_left(self) -> int:
        if not self.num_decodes:
            return self.num_tokens_left
        if self._prefill_context >= self._max_prefill_context_with_decodes:
            return 0
        return min(self.num_tokens_left, self._max_prefill_tokens_with_decodes - self._num_prefill_tokens)

    def _num_fitting(self, request: Request) -> int:
        if request.is_decoding:
            return min(request.num_tokens_to_compute, self.num_tokens_left)
        num_fitting = min(request.num_tokens_to_compute, max(0, self._num_prefill_tokens_left))
        if not self.num_decodes or not num_fitting:
            return num_fitting
        num_context = request.num_computed_tokens + num_fitting
        left = self._max_prefill_context_with_decodes - self._prefill_context
        return min(num_fitting, left // num_context) or int(not self._num_prefill_tokens)  # a prompt goes on: 1 token

    def _add(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            samples = num_tokens == request.num_tokens_to_compute
            run = ScheduledRun(request, request.num_computed_tokens, num_tokens, samples)
            self.runs[request] = run
            self.num_tokens_left -= num_tokens
            self._count(run, 1)

    def _count(self, run: ScheduledRun, sign: int) -> None:
        if run.is_decode:
            self.num_decodes += sign
        else:
            self._num_prefill_tokens += sign * run.num_tokens
            self._prefill_context += sign * run.num_tokens * run.end
