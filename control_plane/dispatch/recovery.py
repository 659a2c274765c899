"""Recovers requests whose worker is lost after it had accepted the request.

The cases, in the order that a request meets them:

1. A worker is lost before both halves have accepted. `RequestStarter` tries the next route. A recovery that has begun
   waits until the request has started, finds that its call was replaced, and ends.
2. A prefill worker is lost before its last output. `_prefill_lost` starts the request again with another prefill
   worker, once, if that is predicted to be sooner. Otherwise it aborts the KV handle, which makes decode compute the
   prompt itself.
3. A decode worker is lost. `_choice_lost` gives the dead reader's lease back and moves the choice. Another decode
   worker computes prompt and tokens so far, and continues with the next token. While no worker has room, or the retry
   budget is spent, the choice waits in front of its model's room; its client sees a pause. The lost worker may take it
   too, if that is well again.
4. A worker contradicts tokens that the client has (`Diverged`). The choice moves as in case 3, and may stay at the same
   worker, which gets those tokens as input.
5. A worker drains. As case 2 or 3, but the loss is not counted. A worker that brings no token (`Stalled`) is left as
   in case 2 or 3 too; the loss counts, but not as a death.
6. The request ends with an error:
   - the error is one that every worker would answer (`doubts.py`), or there is no other worker to ask;
   - a living worker failed, and this was the choice's 4th loss;
   - 3 workers died without a new token in between, or a death was the 10th loss: the prompt is quarantined;
   - no worker had room before the queue's deadline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Coroutine
from typing import Any

from control_plane.dispatch.admission import (
    MAX_DEATHS,
    MAX_DEATHS_IN_A_ROW,
    NoRoom,
    Quarantine,
    RetryBudget,
    look_again_seconds,
)
from control_plane.dispatch.admission_queue import AdmissionQueue, waiter_of
from control_plane.dispatch.class_seams import is_exact_move
from control_plane.dispatch.doubts import ASK_NEXT, FINAL, is_doubted, is_final
from control_plane.dispatch.request_starter import RequestStarter, routing_request, routing_request_for
from control_plane.dispatch.request_state import MAX_ATTEMPTS, ChoiceState, Diverged, RequestState
from control_plane.dispatch.room_keeper import RoomKeeper
from control_plane.dispatch.stall_watch import Stalled
from control_plane.dispatch.submitter import Submitter
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.kv_clients import KvClients
from control_plane.routing.router import Router
from tandem_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet
from tandem_runtime.tracing import record_span

log = get_logger(__name__)

_REFUSALS: tuple[type[TandemError], ...] = (Overloaded, Unavailable, *ASK_NEXT)
"""Errors after which another worker is asked to go on with a choice."""


class Recovery:
    """Recovers requests in background tasks, each of which ends with its request at the latest."""

    def __init__(
        self,
        router: Router,
        starter: RequestStarter,
        submitter: Submitter,
        queue: AdmissionQueue,
        rooms: RoomKeeper,
        budget: RetryBudget,
        quarantine: Quarantine,
        kv_clients: KvClients,
        tasks: TaskSet,
    ) -> None:
        self._router = router
        self._starter = starter
        self._submitter = submitter
        self._queue = queue
        self._rooms = rooms
        self._budget = budget
        self._quarantine = quarantine
        self._kv_clients = kv_clients
        self._tasks = tasks

    def recover(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        """Recover the request from the loss of one call."""
        if call.choice_index is None:
            self._prefill_lost(state, call, error)
        else:
            self._choice_lost(state, state.choices[call.choice_index], call, error)

    # ------------------------------------------------------------------------------------------ a lost prefill

    def _prefill_lost(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        log.warning("prefill_failed", request_id=state.request.request_id, error=error.log_text)
        waiting = [choice for choice in state.choices if not choice.is_over and not choice.tokens]
        is_death = isinstance(error, Unavailable) and not isinstance(error, Stalled)
        if is_death and any(self._is_deadly(state, choice, call) for choice in waiting):
            state.fail(self._quarantine.put(state.request))
            return
        self._spawn(state, self._compute_prompt_elsewhere(state, call, error))

    async def _compute_prompt_elsewhere(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        await state.wait_started()
        if state.prefill is not call or state.handle is None:  # the request was started again meanwhile
            return
        state.avoid_worker(call.incarnation)
        began_at = time.perf_counter()
        if isinstance(error, FINAL) or state.has_restarted or not self._another_prefill_is_sooner(state):
            await self._kv_clients.abort(state.handle, error, state.seconds_left)  # decode computes the prompt itself
            state.prompt_came(call.estimate.total_ms / 1000 if call.estimate is not None else 1.0)
            _note_restart(state, call, began_at, error)
            return
        state.history.restarts(call.worker_id)
        try:
            await self._starter.restart(state, call.incarnation)
            _note_restart(state, call, began_at, error)
        except TandemError as refusal:
            state.fail(refusal)
        except Exception as exception:
            log.exception("unhandled_exception", task="restart", request_id=state.request.request_id)
            kind = type(exception).__name__
            state.fail(InternalError(f"the request could not go on after its worker was lost: {kind}"))

    def _another_prefill_is_sooner(self, state: RequestState) -> bool:
        """Return whether to use another prefill worker; only if every choice still waits for the prompt's cache."""
        running = [choice for choice in state.choices if not choice.is_over]
        if not running or not all(_waits_for_cache(choice) for choice in running):
            return False
        try:
            return self._router.choose(routing_request(state), state.avoid).prefill is not None
        except TandemError:
            return False

    # ------------------------------------------------------------------------------------------- a lost decode

    def _choice_lost(self, state: RequestState, choice: ChoiceState, call: WorkerCall, error: TandemError) -> None:
        if choice.is_over:
            return
        if not isinstance(error, Diverged):
            state.choice_lost(choice, call.incarnation)
        if (final := self._final_error(state, choice, call, error)) is not None:
            state.fail(final)
            return
        if state.handle is not None:
            reader_id = f"{state.request.request_id}-{choice.index}"
            self._tasks.spawn(self._kv_clients.release(state.handle, reader_id, state.seconds_left))
        self._spawn(state, self._move_or_fail(state, choice, call, error))

    def _final_error(
        self, state: RequestState, choice: ChoiceState, call: WorkerCall, error: TandemError
    ) -> TandemError | None:
        """Count the loss of a decode worker; return the request's error if this loss was one too many."""
        if is_final(error) or (is_doubted(error) and not self._has_other_decode(state, choice)):
            return error
        if isinstance(error, Draining):
            return None
        num_losses = state.count_loss(choice)
        if isinstance(error, Unavailable) and not isinstance(error, Stalled):
            return self._quarantine.put(state.request) if self._is_deadly(state, choice, call) else None
        return error if num_losses >= MAX_ATTEMPTS else None

    def _has_other_decode(self, state: RequestState, choice: ChoiceState) -> bool:
        try:
            self._router.choose(routing_request_for(state, choice), choice.lost_with)
        except TandemError:
            return False
        return True

    def _is_deadly(self, state: RequestState, choice: ChoiceState, call: WorkerCall) -> bool:
        """Count a worker that died with a choice; return whether these are too many deaths for a coincidence."""
        return state.count_death(choice, call.incarnation) >= MAX_DEATHS_IN_A_ROW or choice.num_losses >= MAX_DEATHS

    async def _move_or_fail(
        self, state: RequestState, choice: ChoiceState, call: WorkerCall, error: TandemError
    ) -> None:
        """Move a choice that lost `call` to `error`; the client gets the error only if the choice cannot move."""
        began_at = time.perf_counter()
        await state.wait_started()
        if choice.call is not call or choice.is_over:  # the request was started again meanwhile
            return
        num_tokens = len(state.request.token_ids) + len(choice.tokens)
        try:
            await self._move_when_there_is_room(state, choice, call, error)
            if choice.call is not None and choice.call is not call:
                workers = call.worker_id, choice.call.worker_id
                state.history.moved("migration", began_at, workers, error, num_tokens)
        except Cancelled:
            log.debug("migration_cancelled", request_id=state.request.request_id, choice=choice.index)
        except TandemError as refusal:
            log.warning("migration_failed", request_id=state.request.request_id, error=refusal.log_text)
            state.fail(refusal if isinstance(refusal, DeadlineExceeded) else error)
        except Exception as exception:
            log.exception("unhandled_exception", task="migration", request_id=state.request.request_id)
            kind = type(exception).__name__
            state.fail(InternalError(f"the answer could not go on after its worker was lost: {kind}"))

    async def _move_when_there_is_room(
        self, state: RequestState, choice: ChoiceState, call: WorkerCall, error: TandemError
    ) -> None:
        """Move a choice now, or as soon as a worker has room or is back."""
        lost = set() if isinstance(error, Diverged) else {call.incarnation}
        deadline = self._queue.deadline(state.request)
        # If no other worker takes the choice at once, any may but the last; then that one too, which may be well again.
        may_return = isinstance(error, Unavailable)
        avoided = itertools.chain([lost | choice.lost_with, lost], itertools.repeat(set() if may_return else lost))
        has_permit = False
        waiter = waiter_of(state.request, 0.0, is_moving=True)
        while not choice.is_over:
            state.avoid_only(next(avoided))
            try:
                if not has_permit:
                    self._budget.take(is_first=choice.num_losses <= 1)
                    has_permit = True
                    log.warning(
                        "migration_started",
                        request_id=state.request.request_id,
                        choice=choice.index,
                        num_tokens=len(choice.tokens),
                        error=error.log_text,
                    )
                await self._move(state, choice, error)
            except _REFUSALS as refusal:
                full = Overloaded(f"no decode worker can go on with the request: {refusal.message}")
                retry_in = look_again_seconds(refusal)
                await self._queue.wait(waiter, full, deadline - time.monotonic(), retry_in=retry_in)
            else:
                self._queue.let_in(waiter)
                return

    async def _move(self, state: RequestState, choice: ChoiceState, error: TandemError) -> None:
        """Try the decode workers, first those that go on as the lost one would; raises the last refusal."""
        state.next_attempt()
        began_ns = time.time_ns()
        last_refusal: TandemError | None = None
        refused: set[str] = set()
        asked = routing_request_for(state, choice)
        while True:
            try:
                route = self._router.choose(asked, state.avoid)
            except Overloaded as no_other:
                raise last_refusal or no_other from None
            if last_refusal is not None and refused.issuperset(worker.incarnation for worker in route.decodes):
                raise last_refusal
            await state.forms.prepare(worker.info.card for worker in route.workers)
            for worker in route.decodes:
                if choice.is_over:
                    return
                try:
                    if not self._rooms.may_take(worker, asked.num_prompt_tokens):
                        raise NoRoom(f"worker {worker.worker_id} is full", retry_after_seconds=1.0)
                    call = self._submitter.submit_choice(state, choice, worker, route)
                    await self._submitter.wait_accepted(state, call)
                except TandemError as refusal:
                    if is_final(refusal) or not (isinstance(refusal, _REFUSALS) or is_doubted(refusal)):
                        raise
                    log.info("migration_refused", worker=worker.worker_id, error=refusal.log_text)
                    last_refusal = refusal
                    refused.add(worker.incarnation)
                    state.avoid_worker(worker.incarnation)
                else:
                    _report_move(state, call, began_ns)
                    return

    def _spawn(self, state: RequestState, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that is cancelled when the request ends."""
        state.recovery_started(self._tasks.spawn(coroutine))


def _report_move(state: RequestState, call: WorkerCall, began_ns: int) -> None:
    """Flag an accepted move in the log and the trace.

    Without `is_exact` the next tokens are valid, but may differ from those that the lost worker would have sampled.
    """
    num_tokens, is_exact = len(call.submit.token_ids), is_exact_move(state, call)
    log.warning(
        "migration_accepted",
        request_id=state.request.request_id,
        choice=call.choice_index,
        num_tokens=num_tokens,
        worker=call.worker_id,
        is_exact=is_exact,
    )
    attributes = {"tandem.choice": call.choice_index, "tandem.tokens": num_tokens, "tandem.is_exact": is_exact}
    record_span("migrate", state.traceparent, began_ns, time.time_ns(), attributes)


def _note_restart(state: RequestState, lost: WorkerCall, began_at: float, error: TandemError) -> None:
    """Note for the request's explanation who computes the prompt now."""
    call = state.prefill if state.prefill is not None and state.prefill is not lost else state.choices[0].call
    to_worker = call.worker_id if call is not None else ""
    workers = lost.worker_id, to_worker
    state.history.moved("restart", began_at, workers, error, len(state.request.token_ids))


def _waits_for_cache(choice: ChoiceState) -> bool:
    """Return whether a choice is at its first decode worker, which waits for the prompt's cache."""
    call = choice.call
    return not choice.tokens and call is not None and call.is_open and call.submit.HasField("handle")
