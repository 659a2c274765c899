"""How does a client ask the dispatcher, and how does it leave?"""

from __future__ import annotations

import asyncio
import random
import time

from control_plane.cache_policy import EVERYTHING, NOTHING
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.request_stream import Flight
from control_plane.generation import TokenDelta, TokenRequest
from tandem_runtime.errors import TandemError
from tests.chaos.pauses import Pauses
from tests.chaos.questions import MODEL_ID, Question
from tests.chaos.reported import STAGES, Stage, Told

_PATIENCE_SECONDS = 90.0
_IMPATIENT_SECONDS = (1.0, 4.0)


def new_told(chance: random.Random, request_id: str, questions: list[Question], *, leaves: bool) -> Told:
    """Draw what one client asks for, how long it waits and whether it leaves."""
    leave_at: Stage | None = chance.choice(STAGES) if leaves else None
    is_impatient = not leaves and chance.random() < 0.04
    seconds = chance.uniform(*_IMPATIENT_SECONDS) if is_impatient else _PATIENCE_SECONDS
    question = chance.choice([question for question in questions if _lasts_until(question, leave_at)])
    return Told(
        request_id,
        question,
        time.time() + seconds,
        is_impatient=is_impatient,
        is_cacheable=chance.random() < 0.8,
        leave_at=leave_at,
    )


async def ask(dispatcher: Dispatcher, told: Told, chance: random.Random, pauses: Pauses) -> None:
    """Ask, and note what comes."""
    request = TokenRequest(
        request_id=told.request_id,
        account=chance.choice(["one", "another"]),
        model_id=MODEL_ID,
        token_ids=told.question.prompt,
        sampling=told.question.sampling,
        choice_seeds=told.question.seeds,
        deadline=told.deadline,
        cache=EVERYTHING if told.is_cacheable else NOTHING,
    )
    try:
        flight = await _submitted(dispatcher, request, told, chance)
        if flight is not None:
            await _listen(flight, told, chance, pauses)
    except TandemError as error:
        told.error = error
    finally:
        told.ended = time.time()


async def _submitted(dispatcher: Dispatcher, request: TokenRequest, told: Told, chance: random.Random) -> Flight | None:
    """Return the running request; None if its client left while it was queued."""
    task = asyncio.create_task(dispatcher.submit(request))
    if told.leave_at != "queued":
        return await task
    await asyncio.wait([task], timeout=chance.random() * 0.05)
    if not task.done():
        told.left_at = "queued"
        told.was_at_the_door = len(dispatcher.waiting_room) > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return task.result()  # it was not queued for long: let it be answered


async def _listen(flight: Flight, told: Told, chance: random.Random, pauses: Pauses) -> None:
    told.route = flight.route
    leave_after = _leave_after(told, chance)
    try:
        if leave_after == 0:
            told.left_at = _stage(flight)
            return
        async for delta in flight:
            _note(told, delta)
            pauses.token_came(told.request_id, delta.choice_index, len(told.tokens[delta.choice_index]))
            if leave_after is not None and sum(map(len, told.tokens)) >= leave_after:
                told.left_at = _stage(flight)
                return
        told.usage = flight.usage
        pauses.ended(flight)
    finally:
        told.route = dict(flight.route)
        await flight.aclose()


def _leave_after(told: Told, chance: random.Random) -> int | None:
    """Return after how many tokens its client leaves."""
    if told.leave_at == "decoding":
        return chance.randint(2, min(40, len(told.question.answers[0].tokens) - 1))
    return {"prefilling": 0, "between": 1}.get(told.leave_at or "")


def _stage(flight: Flight) -> Stage:
    """Return where a request is, by what its workers have sent."""
    longest = max(len(choice.tokens) for choice in flight.choices)
    return "prefilling" if longest == 0 else "between" if longest == 1 else "decoding"


def _note(told: Told, delta: TokenDelta) -> None:
    told.tokens[delta.choice_index] += delta.token_ids
    told.logprobs[delta.choice_index] += [position.chosen.logprob for position in delta.logprobs]
    told.finish_reasons[delta.choice_index] = delta.finish_reason


def _lasts_until(question: Question, stage: Stage | None) -> bool:
    """Whether an answer is long enough, or a prompt, to be left at a stage."""
    num_tokens = min(len(answer.tokens) for answer in question.answers)
    least = {"prefilling": 2, "between": 8, "decoding": 8}.get(stage or "", 1)
    return num_tokens >= least and (stage != "prefilling" or len(question.prompt) >= 60)
