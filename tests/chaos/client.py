"""A client that sends requests to the dispatcher, and may leave early."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import EVERYTHING, NOTHING, TokenDelta, TokenRequest
from tandem_runtime.errors import Overloaded, TandemError
from tests.chaos.pauses import Pauses
from tests.chaos.questions import MODEL_ID, Question
from tests.chaos.stream_record import STAGES, Stage, StreamRecord

_PATIENCE_SECONDS = 90.0
_IMPATIENT_SECONDS = (1.0, 4.0)


def rarest_stage(rng: random.Random, records: list[StreamRecord]) -> Stage:
    """Return the stage at which the fewest clients have left: some come late, and leave at a later one."""
    left = Counter(record.left_at for record in records)
    return min(STAGES, key=lambda stage: (left[stage], rng.random()))


def new_record(
    rng: random.Random, request_id: str, questions: list[Question], *, leave_at: Stage | None
) -> StreamRecord:
    """Pick one client's request and its deadline."""
    is_impatient = leave_at is None and rng.random() < 0.04
    seconds = rng.uniform(*_IMPATIENT_SECONDS) if is_impatient else _PATIENCE_SECONDS
    question = rng.choice(_lasting_until(leave_at, questions))
    return StreamRecord(
        request_id,
        question,
        time.monotonic() + seconds,
        is_impatient=is_impatient,
        is_cacheable=rng.random() < 0.8 and leave_at != "prefilling",
        leave_at=leave_at,
    )


async def ask(
    dispatcher: Dispatcher,
    record: StreamRecord,
    rng: random.Random,
    pauses: Pauses,
    was_overloaded: Callable[[float], bool],
) -> None:
    """Send the request, and record the stream. Refused while the fleet is overloaded, a client comes back in time."""
    request = TokenRequest(
        request_id=record.request_id,
        account=rng.choice(["one", "another"]),
        model_id=MODEL_ID,
        token_ids=record.question.prompt,
        sampling=record.question.sampling,
        choice_seeds=record.question.seeds,
        deadline=record.deadline,
        cache=EVERYTHING if record.is_cacheable else NOTHING,
    )
    try:
        stream = await _submitted_at_last(dispatcher, request, record, rng, was_overloaded)
        if stream is not None:
            await _listen(stream, record, rng, pauses)
    except TandemError as error:
        record.error = error
    finally:
        record.ended = time.monotonic()


async def _submitted_at_last(
    dispatcher: Dispatcher,
    request: TokenRequest,
    record: StreamRecord,
    rng: random.Random,
    was_overloaded: Callable[[float], bool],
) -> RequestStream | None:
    while True:
        since = time.monotonic()
        try:
            return await _submitted(dispatcher, request, record, rng)
        except Overloaded as refusal:
            if refusal.retry_after_seconds is None or not was_overloaded(since) or record.deadline <= time.monotonic():
                raise
            record.num_refused += 1
            await asyncio.sleep(min(refusal.retry_after_seconds, max(0.0, record.deadline - time.monotonic())))


async def _submitted(
    dispatcher: Dispatcher, request: TokenRequest, record: StreamRecord, rng: random.Random
) -> RequestStream | None:
    """Return the running request; None if the client left while the request was queued."""
    task = asyncio.create_task(dispatcher.submit(request))
    if record.leave_at != "queued":
        return await task
    await asyncio.wait([task], timeout=rng.random() * 0.05)
    if not task.done():
        record.left_at = "queued"
        record.left_admission_queue = len(dispatcher.queue) > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return task.result()  # the request was not queued for long: let it run


async def _listen(stream: RequestStream, record: StreamRecord, rng: random.Random, pauses: Pauses) -> None:
    record.route = stream.route
    leave_after = _leave_after(record, rng)
    try:
        if leave_after == 0:
            record.left_at = _stage(stream)
            return
        async for delta in stream:
            _note(record, delta)
            pauses.token_came(record.request_id, delta.choice_index, len(record.tokens[delta.choice_index]))
            if leave_after is not None and sum(map(len, record.tokens)) >= leave_after:
                record.left_at = _stage(stream)
                return
        record.usage = stream.usage
        pauses.ended(stream)
    finally:
        record.route = dict(stream.route)
        await stream.aclose()


def _leave_after(record: StreamRecord, rng: random.Random) -> int | None:
    """Return the number of tokens after which the client leaves."""
    if record.leave_at == "decoding":
        return rng.randint(2, min(40, len(record.question.answers[0].tokens) - 1))
    return {"prefilling": 0, "between": 1}.get(record.leave_at or "")


def _stage(stream: RequestStream) -> Stage:
    """Return the stage of a request, from what its workers have sent."""
    longest = max(len(choice.tokens) for choice in stream.state.choices)
    return "prefilling" if longest == 0 else "between" if longest == 1 else "decoding"


def _note(record: StreamRecord, delta: TokenDelta) -> None:
    record.tokens[delta.choice_index] += delta.token_ids
    record.logprobs[delta.choice_index] += [position.chosen.logprob for position in delta.logprobs]
    record.finish_reasons[delta.choice_index] = delta.finish_reason


def _lasting_until(stage: Stage | None, questions: list[Question]) -> list[Question]:
    """Return the questions whose prompts and answers are long enough to leave at a stage."""
    least = {"prefilling": 2, "between": 8, "decoding": 8}.get(stage or "", 1)
    lasting = [each for each in questions if min(len(answer.tokens) for answer in each.answers) >= least]
    if stage == "prefilling":  # a client hears of its request once decode has reserved; a short prompt is computed then
        return sorted(lasting, key=lambda question: -len(question.prompt))[: max(1, len(lasting) // 4)]
    return lasting
