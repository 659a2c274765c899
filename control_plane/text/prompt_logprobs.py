"""How likely were a prompt's own tokens? What `echo` with `logprobs` shows.

The engine gives the log probabilities of tokens that it generates, so each token of the prompt is generated once, from
what stands before it, with a bias that makes it the likeliest: log probabilities come from raw logits, before any bias.
With the prompt caches that computes about one block for each token. The number of tokens is bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from control_plane.generation import Dispatcher, Logprob, PositionLogprobs, TokenRequest, Usage
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError

MAX_SCORED_TOKENS = 2048
_MAX_AT_ONCE = 16
_BIAS = 100.0


def check_scored(num_prompt_tokens: int) -> None:
    """Raise InvalidRequest if the prompts of one HTTP request have too many tokens together."""
    if num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"echo with logprobs takes up to {MAX_SCORED_TOKENS:,} prompt tokens in a request, this one has "
            f"{num_prompt_tokens:,}; send several requests, shorter prompts, or leave echo or logprobs out",
            field="echo",
        )


async def prompt_logprobs(
    dispatcher: Dispatcher, request: TokenRequest, num_logprobs: int, used: list[Usage]
) -> Sequence[PositionLogprobs]:
    """Return those of every token of the request's prompt but the first, which follows nothing; raises TandemError.

    `used` gets what was done for each token, also where not all of them could be scored.
    """
    places = range(len(request.token_ids) - 1, 0, -1)  # the longest first: it leaves the blocks that the others find
    slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(place: int) -> PositionLogprobs:
        async with slots:
            return await _of_token(dispatcher, request, place, num_logprobs, used)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(place)) for place in places]
    except* TandemError as failed:
        raise _first(failed) from None
    return [task.result() for task in reversed(tasks)]


async def _of_token(
    dispatcher: Dispatcher, request: TokenRequest, place: int, num_logprobs: int, used: list[Usage]
) -> PositionLogprobs:
    target = request.token_ids[place]
    stream = await dispatcher.submit(
        replace(
            request,
            request_id=f"{request.request_id}-prompt-{place}",
            token_ids=request.token_ids[:place],
            num_public_tokens=min(request.num_public_tokens, place),
            sampling=SamplingParams(
                max_tokens=1, temperature=0.0, logit_bias={target: _BIAS}, num_logprobs=num_logprobs
            ),
            choice_seeds=(0,),
        )
    )
    try:
        found = [logprobs async for delta in stream for logprobs in delta.logprobs]
    finally:
        await stream.aclose()
    used.append(stream.usage)
    if len(found) != 1:
        raise InternalError(f"{len(found)} log probabilities came for one token of the prompt; try again")
    if found[0].chosen.token_id == target:
        return found[0]
    return PositionLogprobs(Logprob(target, -math.inf, 0), found[0].top)  # so unlikely that the bias did not help


def _first(failed: BaseExceptionGroup[TandemError]) -> TandemError:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TandemError), "the group has nothing else"
    return error
