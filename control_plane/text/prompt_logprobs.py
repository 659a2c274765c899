"""Computes the log probabilities of a prompt's own tokens, for `echo` with `logprobs`.

The engine returns log probabilities of generated tokens only. So each token of the prompt is generated once, from the
tokens before it, with a bias that makes it the likeliest. Log probabilities come from raw logits, before any bias.
With the prompt caches this computes about one block per token. The number of tokens is bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from control_plane.explain.history import History
from control_plane.generation import Dispatcher, Logprob, PositionLogprobs, TokenRequest, Usage
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError

MAX_SCORED_TOKENS = 2048
_MAX_AT_ONCE = 16
_BIAS = 100.0


def check_scored(num_prompt_tokens: int) -> None:
    """Raise InvalidRequest if the prompts of one HTTP request together have too many tokens."""
    if num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"echo with logprobs takes up to {MAX_SCORED_TOKENS:,} prompt tokens in a request, this one has "
            f"{num_prompt_tokens:,}; send several requests, shorter prompts, or leave echo or logprobs out",
            field="echo",
        )


async def prompt_logprobs(
    dispatcher: Dispatcher, request: TokenRequest, num_logprobs: int, used: list[Usage]
) -> Sequence[PositionLogprobs]:
    """Return the log probabilities of every token of the prompt but the first. Raise TandemError.

    The usage of each token is appended to `used`, also if scoring fails for another token.
    """
    positions = range(len(request.token_ids) - 1, 0, -1)  # longest first: its blocks are cached for the others
    slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(position: int) -> PositionLogprobs:
        async with slots:
            return await _score_token(dispatcher, request, position, num_logprobs, used)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(position)) for position in positions]
    except* TandemError as failed:
        raise _first(failed) from None
    return [task.result() for task in reversed(tasks)]


async def _score_token(
    dispatcher: Dispatcher, request: TokenRequest, position: int, num_logprobs: int, used: list[Usage]
) -> PositionLogprobs:
    target = request.token_ids[position]
    stream = await dispatcher.submit(
        replace(
            request,
            request_id=f"{request.request_id}-prompt-{position}",
            token_ids=request.token_ids[:position],
            wire=None,
            num_public_tokens=min(request.num_public_tokens, position),
            sampling=SamplingParams(
                max_tokens=1, temperature=0.0, logit_bias={target: _BIAS}, num_logprobs=num_logprobs
            ),
            choice_seeds=(0,),
            history=History(),
        )
    )
    try:
        found = [logprobs async for delta in stream for logprobs in delta.logprobs]
    finally:
        await stream.aclose()
    used.append(stream.usage)
    if len(found) != 1:
        raise InternalError(
            f"the engine returned {len(found)} log probabilities for one token of the prompt; try again"
        )
    if found[0].chosen.token_id == target:
        return found[0]
    return PositionLogprobs(Logprob(target, -math.inf, 0), found[0].top)  # so unlikely that the bias was not enough


def _first(failed: BaseExceptionGroup[TandemError]) -> TandemError:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TandemError), "the group has only TandemErrors"
    return error
