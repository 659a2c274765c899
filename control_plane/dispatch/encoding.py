"""Sends texts to encode workers: in parts, to the workers with the least to do of those that have granted room.

A part has no state. If its worker dies, drains or is full, the part goes to another worker, and gets the same values.
While no worker of its model has room for it, it waits in a room per model, within the bounds of the admission queue.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.admission.model_admission import Waiter
from control_plane.dispatch.admission import MAX_DEATHS_IN_A_ROW
from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.dispatch.demand_reports import DemandReports, let_in_of, turns_of
from control_plane.dispatch.encode_workers import EncodeWorkers
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.generation import EncoderInput, EncodingRequest
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    Aborted,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem_runtime.log import get_logger
from tandem_runtime.tracing import current_traceparent

log = get_logger(__name__)

MAX_PART_TOKENS = 4_096
MAX_PART_INPUTS = 64
"""A part is some steps of a worker: others get their turns between two parts, and a lost part costs little."""
_MAX_PARTS_AT_ONCE = 4
"""Of one request."""
MAX_CANDIDATES = 3
"""Workers that a part asks before it waits."""
_RETRY_SECONDS = 1.0
_TOKEN_COST = 1.0
"""Costs are compared with each other only. A worker counts tokens, too, so both mean the same."""
_MAX_TOKENS_AT_ONCE = 4 * MAX_PART_TOKENS
"""Parts that have waited follow each other at once while a worker has at most so many tokens of this gateway. Of a
worker that grants nothing: its grants say how many."""


@dataclass(eq=False)
class _Part:
    """Some inputs of a request on their way to a worker."""

    request: EncodingRequest
    inputs: Sequence[EncoderInput]
    num_tokens: int
    waiter: Waiter
    """Its place among those that wait."""
    num_attempts: int = 0
    avoid: set[str] = field(default_factory=set)
    """Incarnations that have refused or lost the part since it last waited."""
    lost: set[str] = field(default_factory=set)
    """Incarnations that have lost the part."""
    refusal: TandemError | None = None
    waits_until: float | None = None

    @property
    def seconds_left(self) -> float:
        return self.request.deadline - time.monotonic()

    def refused(self, worker: Worker, error: TandemError) -> None:
        """Ask another worker, or wait: this one does not answer."""
        self.avoid.add(worker.incarnation)
        self.refusal = error

    def lost_with(self, worker: Worker) -> int:
        """Count a worker that was lost with the part; return how many were."""
        self.lost.add(worker.incarnation)
        return len(self.lost)

    def has_waited(self) -> None:
        """Ask every worker again."""
        self.avoid.clear()


class EncodingDispatch:
    """Implements control_plane.generation.EncodingDispatcher."""

    def __init__(
        self,
        registry: WorkerRegistry,
        clients: EncoderClients,
        queue_seconds: float,
        max_waiting: int,
        max_waiting_per_account: int = 0,
    ) -> None:
        self._registry = registry
        self._workers = EncodeWorkers(registry)
        self._clients = clients
        self._queue_seconds = queue_seconds
        self.queue = AdmissionQueue(max_waiting, queue_seconds, max_waiting_per_account, answer_token_ms=_TOKEN_COST)
        self.num_requests = 0
        """Requests that wait or run."""
        self._reports = DemandReports(registry, clients, self.queue, (pb.WORKER_ROLE_ENCODE,))
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        clients.listen(self._attached, self._granted)
        self._running: set[asyncio.Task[None]] = set()
        self._stopped: Callable[[], TandemError] | None = None
        self._unable: set[str] = set()
        """Incarnations that have refused or lost a part, and not answered, granted or reported since. Waiting parts do
        not look because of them: else parts that are refused at once would take turns without end."""
        self._to_look: set[str] = set()
        """Models whose parts may look in the next turn of the loop."""
        self._let_in: dict[Waiter, str] = {}
        """Parts that may look, and are charged for as if they were sent; by the room of which worker."""
        self._tokens: Counter[str] = Counter()
        """Tokens that this gateway has sent to each incarnation, and that are not answered yet."""

    async def encode(self, request: EncodingRequest, computed: list[int]) -> bytes:
        """Return the values of all inputs. If this is cancelled, the workers drop what is left."""
        parts = [_part(request, inputs) for inputs in _parts(request.inputs)]
        answers: list[bytes | None] = [None] * len(parts)
        waiting = iter(enumerate(parts))

        async def run() -> None:
            try:
                for index, part in waiting:
                    part.waiter.has_begun = bool(computed)
                    answers[index] = await self._answer(part)
                    computed.append(part.num_tokens)
            except asyncio.CancelledError:
                self._check_stopped()
                raise

        self._check_stopped()
        self.num_requests += 1
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_MAX_PARTS_AT_ONCE, len(parts))):
                    task = group.create_task(run())
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        except BaseExceptionGroup as group_error:
            raise _first(group_error) from None
        finally:
            self.num_requests -= 1
        complete = [answer for answer in answers if answer is not None]
        if len(complete) < len(parts):
            raise InternalError(
                f"{len(parts) - len(complete)} of {len(parts)} parts have no values; send the request again"
            )
        return b"".join(complete)

    def stop(self, error: Callable[[], TandemError]) -> None:
        """End all requests with an error, each with its own; workers drop what they compute. Refuse later ones."""
        self._stopped = error
        self._reports.close()
        self.queue.close(error())
        for task in tuple(self._running):
            task.cancel()

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped()

    async def _answer(self, part: _Part) -> bytes:
        """Return the values of a part, from whichever worker answers. Raise TandemError."""
        try:
            if self.queue.must_wait(part.waiter):
                await self._wait(part)
            while True:
                worker = self._pick(part)
                if worker is None:
                    await self._wait(part)
                    continue
                try:
                    values = await self._send(worker, part)
                except TandemError as error:
                    self._failed(worker, part, error)
                else:
                    self._let_look(part.request.model.model_id, worker)
                    return values
        finally:
            self.queue.gone(part.waiter)
            self._take_back(part)

    def _pick(self, part: _Part) -> Worker | None:
        """Return a worker that has room: that with the fewest tokens to compute, by its report and what was sent since.

        A part asks three workers, and then waits.
        """
        if len(part.avoid) >= MAX_CANDIDATES:
            return None
        model = part.request.model
        workers = [
            worker
            for worker in self._workers.some(model.model_id, self._let_in.get(part.waiter, ""))
            if worker.identity.hex() == model.identity  # else its tokenizer may be another
            and worker.incarnation not in part.avoid
        ]
        has_room = [each for each in workers if self._clients.has_room(each, part.num_tokens) is not False]
        return min(has_room, key=self._load_of, default=None)

    def _let_look(self, model_id: str, worker: Worker) -> None:
        """Let those parts of a model look for a worker that are next and for which there is room, at this one maybe.

        In the next turn of the loop, once for all that happens in this one: parts that may look now have been sent.
        """
        self._workers.told(worker)
        if model_id not in self._to_look:
            self._to_look.add(model_id)
            asyncio.get_running_loop().call_soon(self._give_turns, model_id)

    def _give_turns(self, model_id: str) -> None:
        self._to_look.discard(model_id)
        workers = [each for each in self._workers.some(model_id) if each.incarnation not in self._unable]
        calls, tokens = Counter[str](), Counter[str]()  # that get their turns now, by incarnation
        is_granted, worker_id = True, ""

        def has_room(waiter: Waiter) -> bool:
            nonlocal is_granted, worker_id
            rooms = {
                each: self._clients.has_room(
                    each, tokens[each.incarnation] + waiter.num_tokens, calls[each.incarnation] + 1
                )
                for each in workers
            }
            having = [each for each, room in rooms.items() if room is not False]
            if not having:
                return False
            worker = min(having, key=lambda each: self._load_of(each) + tokens[each.incarnation])
            calls[worker.incarnation] += 1
            tokens[worker.incarnation] += waiter.num_tokens
            is_granted, worker_id = rooms[worker] is not None, worker.worker_id
            return True

        while is_granted and (waiter := self.queue.reported(model_id, has_room, may_offer=False)) is not None:
            self.queue.let_in(waiter, waiter.cost_ms, is_last=True)
            self._let_in[waiter] = worker_id

    def _take_back(self, part: _Part) -> None:
        """A part was not sent although it had its turn."""
        if part.waiter in self._let_in:
            del self._let_in[part.waiter]
            self.queue.take_back(part.waiter)

    def _load_of(self, worker: Worker) -> int:
        return max(self._tokens[worker.incarnation], worker.load.num_tokens_in_flight)

    def _refusal(self, part: _Part) -> TandemError:
        """Return why a part waits that no worker has refused."""
        model_id = part.request.model.model_id
        if self._workers.some(model_id):
            return _busy(part)
        return Unavailable(f"no encode worker is ready for {model_id}", retry_after_seconds=_RETRY_SECONDS)

    async def _wait(self, part: _Part) -> None:
        """Wait until a worker may have room. Raise the last refusal after the queue's time."""
        refusal = part.refusal or self._refusal(part)
        if part.request.reject_if_busy:
            raise refusal
        self._take_back(part)
        now = time.monotonic()
        if part.waits_until is None:
            part.waits_until = min(part.request.deadline, now + self._queue_seconds)
        await self.queue.wait(part.waiter, refusal, part.waits_until - now)
        part.has_waited()

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self._unable.discard(worker.incarnation)
        if not is_here:
            self.queue.worker_gone(worker.info.card.model_id, worker.incarnation)
        elif worker.role == pb.WORKER_ROLE_ENCODE and worker.is_usable:
            self.queue.release_next(worker.info.card.model_id)

    def _reported(self, worker: Worker) -> None:
        """A worker that reports a free place may take what waits, unless it says so by grants."""
        if worker.role == pb.WORKER_ROLE_ENCODE and not self._clients.uses_grants(worker):
            self._unable.discard(worker.incarnation)
            self.queue.reported(worker.info.card.model_id, lambda waiter: not worker.load.num_waiting)

    def _attached(self, worker: Worker) -> None:
        self._reports.attached(worker)
        self.queue.release_next(worker.info.card.model_id)

    def _granted(self, worker: Worker, grant: pb.Grant) -> None:
        """Take in a grant, and let the next part of the model look if it is within it."""
        if not self._registry.is_here(worker):
            return
        model_id = worker.info.card.model_id
        self._unable.discard(worker.incarnation)
        self.queue.granted(model_id, worker.incarnation, turns_of(grant), let_in_of(grant))
        self._let_look(model_id, worker)

    async def _send(self, worker: Worker, part: _Part) -> bytes:
        self.queue.gone(part.waiter)
        if part.waiter in self._let_in:
            del self._let_in[part.waiter]
        else:
            self.queue.let_in(part.waiter, part.waiter.cost_ms, is_last=True)
        seconds = part.seconds_left
        if seconds <= 0:
            raise DeadlineExceeded("the request's deadline passed before all of its texts were encoded; send fewer")
        part.num_attempts += 1
        self._tokens[worker.incarnation] += part.num_tokens
        if self._clients.uses_grants(worker) or self._tokens[worker.incarnation] <= _MAX_TOKENS_AT_ONCE:
            self._let_look(part.request.model.model_id, worker)
        try:
            sent_at = time.perf_counter()
            message = _message(worker, part, seconds)
            reply = await self._clients.encode(worker, message, part.num_tokens, seconds)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the client left, or another part failed
            # The channel was closed because the worker is gone. A TaskGroup would take this part for done.
            raise Unavailable(f"worker {worker.worker_id} left during the call") from None
        finally:
            self._tokens[worker.incarnation] -= part.num_tokens
            if not self._tokens[worker.incarnation]:
                del self._tokens[worker.incarnation]
        _check(worker, part, reply)
        self._unable.discard(worker.incarnation)
        part.request.history.encoded(worker.worker_id, sent_at, part.num_tokens, reply.ledger)
        return bytes(reply.values)

    def _failed(self, worker: Worker, part: _Part, error: TandemError) -> None:
        """Note that a worker did not answer. Raise what no other worker would answer."""
        self.queue.take_back(part.waiter)
        is_callers = isinstance(error, InvalidRequest) and not isinstance(error, ModelNotFound)
        if is_callers or isinstance(error, DeadlineExceeded):
            raise error
        known = self._registry.get(worker.worker_id)
        if known is not None and known.incarnation == worker.incarnation:
            self._unable.add(worker.incarnation)
        if isinstance(error, Overloaded):
            if not isinstance(error, Draining):
                error = _busy(part, error.retry_after_seconds or _RETRY_SECONDS)
            part.refused(worker, error)
            return
        part.refused(worker, error)
        log.warning(
            "encode_call_lost", worker=worker.worker_id, request_id=part.request.request_id, error=error.log_text
        )
        num_lost = part.lost_with(worker)
        if num_lost >= MAX_DEATHS_IN_A_ROW:
            raise Aborted(
                f"{num_lost} encode workers were lost with this request, the last one with: {error.message}; "
                "change the request, or have an operator look at the workers' logs"
            ) from error


def _parts(inputs: Sequence[EncoderInput]) -> Iterator[Sequence[EncoderInput]]:
    """Cut a request into parts of bounded size; an input that is longer than a part is one."""
    first, num_tokens = 0, 0
    for index, each in enumerate(inputs):
        is_full = index - first == MAX_PART_INPUTS or num_tokens + each.num_tokens > MAX_PART_TOKENS
        if index > first and is_full:
            yield inputs[first:index]
            first, num_tokens = index, 0
        num_tokens += each.num_tokens
    yield inputs[first:]


def _part(request: EncodingRequest, inputs: Sequence[EncoderInput]) -> _Part:
    num_tokens = sum(each.num_tokens for each in inputs)
    cost = _TOKEN_COST * num_tokens
    waiter = Waiter(
        request.model.model_id,
        request.account,
        request.priority,
        num_tokens=num_tokens,
        cost_ms=cost,
        deadline=request.deadline,
    )
    return _Part(request, inputs, num_tokens, waiter)


def _busy(part: _Part, retry_after_seconds: float = _RETRY_SECONDS) -> Overloaded:
    return Overloaded(
        f"every encode worker of {part.request.model.model_id} is busy; try again later",
        retry_after_seconds=retry_after_seconds,
    )


def _message(worker: Worker, part: _Part, seconds: float) -> pb.EncodeRequest:
    request, card = part.request, worker.info.card
    return pb.EncodeRequest(
        request_id=request.request_id,
        attempt=part.num_attempts,
        model=pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest),
        inputs=[
            pb.EncodeInput(token_ids=each.token_ids, num_first_tokens=each.num_first_tokens) for each in part.inputs
        ],
        time_left_ms=max(1, int(seconds * 1000)),
        traceparent=current_traceparent(),
        fairness_key=request.account,
        pooling=request.pooling,
        priority=request.priority,
    )


def _check(worker: Worker, part: _Part, reply: pb.EncodeReply) -> None:
    """Raise InternalError for an answer that is not the values of these inputs."""
    assert part.request.model.encoder is not None, "an encoder's card says what it makes"
    wanted = 4 * part.request.model.encoder.num_values * len(part.inputs)
    if len(reply.values) != wanted:
        raise InternalError(f"worker {worker.worker_id} sent {len(reply.values):,} bytes of values for {wanted:,}")
    if not math.isfinite(sum(floats(reply.values))):  # one value that is not finite makes the sum so
        raise InternalError(f"worker {worker.worker_id} sent values that are not finite")


def floats(values: bytes) -> array[float]:
    """Return float32 values from their little-endian bytes."""
    found = array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    """Return the error that ended a request's first part; the other parts were cancelled, or failed beside it."""
    first: BaseException = errors.exceptions[0]
    return first
