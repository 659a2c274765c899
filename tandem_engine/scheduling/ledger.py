"""Counts what was done for each request and since the engine's start.

Longest times: `longest_answer_step_seconds` is that of a step with an answer in it, `longest_commands_seconds` that of
all commands between two steps, imports of KV included, and `longest_copy_seconds` that of all imports and loads of KV
for one step; `longest_copy_cpu_seconds` is the same in processor time of the engine's thread.

Each prompt token is counted once: `prompt = computed + cached` for an aggregated or a prefill request, also after a
preemption. A decode request's prompt is computed elsewhere: every prompt token that runs through the model here also
counts as `reprefill_tokens`, which should stay 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem_engine.messages import EngineStats, FinishReason, PhaseTimes, RequestOutput
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.request import Request, RequestState, Sampled

COUNTERS = (
    "steps",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "tokens_generated",
    "preemptions",
    "step_seconds",
    "longest_answer_step_seconds",
    "longest_commands_seconds",
    "longest_copy_seconds",
    "longest_copy_cpu_seconds",
    "reprefill_tokens",
    "blocks_imported",
    "bytes_imported",
    "prompt_tokens_loaded",
    "blocks_corrupt",
    "draft_tokens",
    "draft_tokens_accepted",
)


class Ledger:
    """Owns the counts of requests and the totals since start."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._clock = clock

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] += amount

    def record_longest(self, name: str, seconds: float) -> None:
        self.counters[name] = max(self.counters[name], seconds)

    def scheduled(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.scheduled_ns = request.scheduled_ns or self._clock()

    def found(self, request: Request, num_tokens: int) -> None:
        """Count the first `num_tokens` of a request, found in the prefix cache, unless they were counted before."""
        num_new = max(0, min(num_tokens, request.num_prompt_tokens) - request.num_prompt_tokens_accounted)
        request.num_prompt_tokens_accounted += num_new
        request.num_cached_tokens += num_new
        self.count("prompt_tokens_cached", num_new)

    def loaded(self, request: Request, num_tokens: int) -> None:
        """Count the first `num_tokens` of a request; the last of them were just loaded."""
        num_before = request.num_cached_tokens
        self.found(request, num_tokens)
        request.num_loaded_tokens += request.num_cached_tokens - num_before
        self.count("prompt_tokens_loaded", request.num_cached_tokens - num_before)

    def computed(self, request: Request, first_position: int, num_tokens: int) -> None:
        end = min(first_position + num_tokens, request.num_prompt_tokens)
        if request.mode == "decode":
            num_new = max(0, end - first_position)
            self.count("reprefill_tokens", num_new)
        else:
            num_new = max(0, end - max(first_position, request.num_prompt_tokens_accounted))
            request.num_prompt_tokens_accounted += num_new
        request.num_prompt_tokens_computed += num_new
        # A decode that found all of its prompt may still compute the end of it: those tokens were not cached.
        num_not_computed = max(0, request.num_prompt_tokens - request.num_prompt_tokens_computed)
        request.num_cached_tokens = min(request.num_cached_tokens, num_not_computed)
        self.count("prompt_tokens_computed", num_new)

    def sampled(self, request: Request, num_tokens: int = 1, num_choices: int = 1) -> None:
        """Count more tokens of each choice."""
        request.num_generated_tokens += num_tokens
        request.first_token_ns = request.first_token_ns or self._clock()
        self.count("tokens_generated", num_tokens * num_choices)

    def drafted(self, request: Request, num_tokens: int, num_accepted: int) -> None:
        request.num_draft_tokens += num_tokens
        request.num_accepted_tokens += num_accepted
        self.count("draft_tokens", num_tokens)
        self.count("draft_tokens_accepted", num_accepted)

    def preempted(self, request: Request) -> None:
        request.num_preemptions += 1
        self.count("preemptions")

    def output(
        self,
        request: Request,
        answer: Sequence[Sampled],
        finish_reason: FinishReason | None,
        *,
        choice_index: int = 0,
        is_last: bool,
    ) -> RequestOutput:
        """Return an output: tokens of one choice that follow `token_ids`, and the current counts."""
        finished_ns = self._clock() if is_last else 0
        return RequestOutput(
            request_id=request.request_id,
            choice_index=choice_index,
            token_ids=[token.token_id for token in answer],
            position=request.num_tokens,
            logprobs=[token.logprobs for token in answer if token.logprobs is not None],
            finish_reason=finish_reason,
            is_last=is_last,
            num_computed_tokens=request.num_prompt_tokens_computed,
            num_cached_tokens=request.num_cached_tokens,
            num_loaded_tokens=request.num_loaded_tokens,
            num_generated_tokens=request.num_generated_tokens,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            num_preemptions=request.num_preemptions,
            times=PhaseTimes(request.added_ns, request.scheduled_ns, request.first_token_ns, finished_ns),
        )


def engine_stats(
    requests: Iterable[Request], num_running: int, pool: BlockPool, counters: Mapping[str, float]
) -> EngineStats:
    """Return the counts of all requests; those whose blocks are being imported count as waiting."""
    alive = [request for request in requests if request.state is not RequestState.HELD]
    return EngineStats(
        num_running=num_running,
        num_waiting=len(alive) - num_running,
        num_tokens_in_flight=sum(request.num_tokens_in_flight for request in alive),
        num_total_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_used_blocks=pool.num_used,
        num_held_blocks=pool.num_held,
        counters=dict(counters),
    )
