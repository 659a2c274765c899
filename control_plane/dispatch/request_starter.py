"""Starts a request on workers: tries routes until a decode and a prefill worker have both accepted it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from control_plane.admission.model_admission import Waiter
from control_plane.admission.prices import PredictedWork
from control_plane.dispatch.admission import NoRoom, RetryBudget, look_again_seconds
from control_plane.dispatch.admission_queue import AdmissionQueue, waiter_of
from control_plane.dispatch.doubts import ASK_NEXT, is_final
from control_plane.dispatch.request_state import ChoiceState, RequestState
from control_plane.dispatch.room_keeper import MAX_CANDIDATES, RoomKeeper
from control_plane.dispatch.route_feedback import RouteFeedback
from control_plane.dispatch.submitter import Submitter
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.registry import RESTART_SECONDS
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.room_search import Lack, find_room
from control_plane.routing.router import Route, Router
from tandem_runtime.errors import ModelNotFound, Overloaded, TandemError, Unavailable
from tandem_runtime.kv.spaces import model_identity
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import FewPerTurn, TaskSet
from tandem_runtime.tracing import span

log = get_logger(__name__)

_CHOICES_PER_TURN = 8
"""Routes that are chosen in one turn of the event loop: each takes some 0.4 ms in a large fleet, and streams wait."""

_Result = TypeVar("_Result")


class RequestStarter:
    """Starts new requests, and starts requests again whose prefill worker was lost."""

    def __init__(
        self,
        router: Router,
        submitter: Submitter,
        feedback: RouteFeedback,
        queue: AdmissionQueue,
        rooms: RoomKeeper,
        budget: RetryBudget,
        kv_clients: KvClients,
        tasks: TaskSet,
        on_started: Callable[[RequestState], None],
    ) -> None:
        """`on_started` is called with each request whose workers have accepted it."""
        self._router = router
        self._submitter = submitter
        self._feedback = feedback
        self._queue = queue
        self._rooms = rooms
        self._budget = budget
        self._kv_clients = kv_clients
        self._tasks = tasks
        self._on_started = on_started
        self._choices = FewPerTurn(_CHOICES_PER_TURN)

    async def start(self, state: RequestState) -> None:
        """Start a new request as soon as there is room, after those that go before it. Raises TandemError."""
        deadline = self._queue.deadline(state.request)
        waiter = self._waiter(state)
        state.history.came(self._queue.standing(waiter))
        try:
            if self._queue.must_wait(waiter) and not state.request.reject_if_busy:
                why = f"requests before this one wait for room at the workers of {waiter.model_id}; try again later"
                await self._wait(state, waiter, Overloaded(why), deadline - time.monotonic())
            await self._start_when_there_is_room(state, waiter, deadline)
        finally:
            self._queue.gone(waiter)

    async def restart(self, state: RequestState, lost: str) -> None:
        """Start a request again, before the requests that wait; avoid the lost incarnation at first."""
        self.abandon(state)
        state.restart(lost)
        waiter = self._waiter(state, is_moving=True)
        await self._start_when_there_is_room(state, waiter, self._queue.deadline(state.request))

    def abandon(self, state: RequestState) -> None:
        """Cancel all calls of an attempt, and end its handle unless every reader has released it."""
        was_open = state.cancel_calls()
        if (state.attempt > 0 or was_open) and state.handle is not None:
            self._tasks.spawn(self._kv_clients.release_all(state.handle, state.seconds_left))

    def _waiter(self, state: RequestState, *, is_moving: bool = False) -> Waiter:
        request = state.request
        room = self._queue.room(request.model_id)
        share = room.cached.of(request.account, request.session_affinity)
        num_tokens, max_tokens = (1 - share) * len(request.token_ids), request.sampling.max_tokens
        cost_ms = room.prices.request_ms(num_tokens, max_tokens, len(state.choices))
        num_answer_tokens = min(room.prices.answer_tokens, max_tokens) * len(state.choices)
        return waiter_of(request, cost_ms, num_answer_tokens, is_moving=is_moving)

    async def _start_when_there_is_room(self, state: RequestState, waiter: Waiter, deadline: float) -> None:
        worker_back_by = min(deadline, time.monotonic() + RESTART_SECONDS)
        while True:
            try:
                await self._try_routes(state, waiter)
            except (Overloaded, Unavailable) as refusal:
                if state.request.reject_if_busy:
                    raise
                until = deadline if isinstance(refusal, Overloaded) else worker_back_by
                await self._wait(state, waiter, refusal, until - time.monotonic())
                state.begin_round()
            else:
                state.started()
                self._feedback.started(state)
                self._on_started(state)
                return

    async def _wait(self, state: RequestState, waiter: Waiter, refusal: TandemError, seconds: float) -> None:
        """Wait in the model's room for the request's turn; its explanation has the time."""
        state.history.waits()
        try:
            await self._queue.wait(waiter, refusal, seconds, retry_in=look_again_seconds(refusal))
        finally:
            state.history.waited()

    async def _try_routes(self, state: RequestState, waiter: Waiter) -> None:
        """Try routes until both halves are accepted; raises the error of the last attempt."""
        while not await self._attempt(state, waiter):
            state.next_attempt()

    async def _attempt(self, state: RequestState, waiter: Waiter) -> bool:
        """Route and submit both halves; return False if another route should be tried."""
        state.take_permit(self._budget)
        await self._choices.next()
        with span("route") as current:
            route = self._choose_route(state, waiter)
            description = route.describe()
            current.set_attributes({f"tandem.route.{name}": value for name, value in description.items()})
        await state.forms.prepare(worker.info.card for worker in route.workers)
        state.route_chosen(description, self._submitter.new_handle(state, route), route.prefill)
        state.history.routed(state.attempt, route)
        try:
            await self._submit_both_halves(state, route, waiter)
        except TandemError as error:
            self.abandon(state)
            self._raise_if_final(state, error)
            return False
        return True

    def _choose_route(self, state: RequestState, waiter: Waiter) -> Route:
        """Return the next route to try, with the workers that are expected to take the request.

        Once all workers have refused, raise the refusal of the first full one; NoRoom if none is expected to take it.
        """
        request = routing_request(state)
        looks: list[Route] = []

        def narrow(route: Route, *, may_offer: bool) -> Route | Lack:
            looks.append(route)
            return self._rooms.narrowed(route, request, may_offer=may_offer)

        try:
            if state.request.reject_if_busy:
                route: Route | None = self._router.choose(request, state.avoid)
            else:
                route = find_room(self._router, request, state.avoid, narrow)
                waiter.num_prefill_tokens = looks[0].num_prefill_tokens
        except Overloaded:
            raise _refusal_of_all(state) from None
        except ModelNotFound as error:  # a worker served the model when the request came, and may be back soon
            raise Unavailable(error.message, retry_after_seconds=2.0) from error
        if route is None:
            raise state.refusal or NoRoom(
                f"every worker of {request.model_id} that can take the request is full; try again later or add workers"
            )
        return self._unless_busy(state, route) if state.request.reject_if_busy else route

    def _unless_busy(self, state: RequestState, route: Route) -> Route:
        if self._router.is_busy(route.decodes):
            raise Overloaded("every decode worker is busy, and the request asks not to wait", retry_after_seconds=1.0)
        if not state.request.is_probe and self._rooms.is_out_of_turn(route):
            raise Overloaded("the prefill worker is busy, and the request asks not to wait", retry_after_seconds=1.0)
        return msgspec.structs.replace(route, decodes=route.decodes[:MAX_CANDIDATES])

    async def _submit_both_halves(self, state: RequestState, route: Route, waiter: Waiter) -> None:
        """Submit both halves at once and wait until both are accepted; raises TandemError.

        Everything is sent before the first await, so that the next request's route counts this request. That one looks
        for room in the next turn of the loop, and does not wait for these workers' answer.
        """
        choices = [choice for choice in state.choices if not choice.is_over]  # over: prefill sent its only token
        estimate = route.estimate(route.prefill or route.decodes[0])
        num_tokens, device_ms = (estimate.num_computed_tokens, estimate.compute_ms) if estimate is not None else (0, 0)
        prices = self._queue.room(waiter.model_id).prices
        num_answer_tokens = waiter.num_answer_tokens / len(state.choices)
        state.predict(PredictedWork(device_ms / prices.ms_per_answer_token, num_answer_tokens))
        waits = [self._wait_reserved(state, choices, self._submit_choices(state, choices, route, 0), route)]
        if route.prefill is not None and state.handle is not None:
            prefill = self._submitter.submit_prefill(state, route.prefill, route)
            waits.append(self._submitter.wait_accepted(state, prefill))
        self._queue.room(waiter.model_id).prefill_share.sent(route.num_prefill_tokens, waiter.num_tokens)
        self._queue.let_in(waiter, device_ms)
        try:
            await _all(waits)
        except BaseException:  # also if the client has left
            self._queue.take_back(waiter)
            raise
        state.charge_to(self._queue.room(waiter.model_id).started(waiter, num_tokens, device_ms))

    def _submit_choices(
        self, state: RequestState, choices: Sequence[ChoiceState], route: Route, rank: int
    ) -> list[WorkerCall]:
        """Send choices to one decode worker of the route, in one turn of the loop: the prompt is sent once."""
        return [self._submitter.submit_choice(state, choice, route.decodes[rank], route) for choice in choices]

    async def _wait_reserved(
        self, state: RequestState, choices: Sequence[ChoiceState], calls: Sequence[WorkerCall], route: Route
    ) -> None:
        """Wait until decode workers have reserved memory; try the route's others in order with what one refuses."""
        for rank in range(1, len(route.decodes) + 1):
            waits = [self._refusal(state, choice, call) for choice, call in zip(choices, calls, strict=True)]
            answers = zip(choices, await _all(waits), strict=True)
            refused = [(choice, refusal) for choice, refusal in answers if refusal is not None and not choice.is_over]
            if not refused:
                return
            if rank == len(route.decodes):
                raise refused[0][1]
            choices = [choice for choice, _ in refused]
            calls = self._submit_choices(state, choices, route, rank)

    async def _refusal(self, state: RequestState, choice: ChoiceState, call: WorkerCall) -> TandemError | None:
        """Wait until a worker has accepted a choice; return its refusal, or raise one that is final."""
        try:
            await self._submitter.wait_accepted(state, call)
        except TandemError as refusal:
            if is_final(refusal):
                raise
            if not choice.is_over:  # else prefill's first token was its last
                state.refused(refusal)
            return refusal
        return None

    def _raise_if_final(self, state: RequestState, error: TandemError) -> None:
        """Raise an error that every other worker would answer too, or the last attempt's; else note the error."""
        state.attempt_failed(error)
        state.history.refused(error)
        log.info("attempt_refused", request_id=state.request.request_id, attempt=state.attempt, error=error.log_text)
        if is_final(error):
            raise error
        if state.is_last_attempt and isinstance(error, ASK_NEXT):
            raise _refusal_of_all(state)
        if state.is_last_attempt:
            raise state.refusal or error


def _refusal_of_all(state: RequestState) -> TandemError:
    """Return the answer for a client whose request every worker has refused."""
    if state.refusal is not None:
        return state.refusal
    if state.doubts.error is not None:
        return state.doubts.error
    if state.mismatch is not None:
        return Unavailable(f"no worker takes the request: {state.mismatch.message}", retry_after_seconds=2.0)
    return Overloaded("every worker refused; try again", retry_after_seconds=1.0)


async def _all(waits: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Wait for all; the first exception cancels the others, and is raised."""
    if len(waits) == 1:  # an ordinary chat: a task and its turns of the loop would delay the first token
        return [await waits[0]]
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def routing_request(state: RequestState) -> RoutingRequest:
    """Return what the router needs to know of the whole request."""
    request, hashes = state.request, state.hashes
    return RoutingRequest(
        request.model_id,
        len(request.token_ids),
        request.sampling.max_tokens,
        hashes.blocks[: hashes.max_found_blocks] if hashes else (),
        hashes.grain if hashes else 1,
        request.session_affinity,
        hand_over="always" if request.is_probe else "if_cheaper",
        num_choices=sum(not choice.is_over for choice in state.choices),
        identity=model_identity(state.card.fingerprint),
    )


def routing_request_for(state: RequestState, choice: ChoiceState) -> RoutingRequest:
    """Return the same for a choice that moves: with tokens so far, its decode worker computes the whole prompt.

    The choice prefers workers of the numerics class that it has its tokens from. Without tokens it prefers workers that
    can read the handle's blocks.
    """
    whole = replace(routing_request(state), num_choices=1)
    if not choice.tokens:
        space = state.writer.space if state.writer is not None else b""
        return replace(whole, hand_over="always" if state.handle is not None else "never", preferred_space=space)
    return replace(
        whole,
        num_prompt_tokens=whole.num_prompt_tokens + len(choice.tokens),
        max_tokens=max(1, whole.max_tokens - len(choice.tokens)),
        block_hashes=state.hashes_with(choice.tokens)[: state.hashes.max_found_blocks] if state.hashes else (),
        hand_over="never",
        preferred_class=numerics_class_of(choice),
    )


def numerics_class_of(choice: ChoiceState) -> str:
    """Return the numerics class of the worker that a choice is at, or was at last; "" if it was at none."""
    return "" if choice.call is None else choice.call.link.worker.info.card.fingerprint.numerics_class
