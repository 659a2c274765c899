"""How does a choice go on when its decode worker is lost?"""

from __future__ import annotations

import time
from collections.abc import Callable

from control_plane.dispatch.admission import WaitingRoom
from control_plane.dispatch.request_state import Plan
from control_plane.dispatch.request_stream import Choice, Diverged
from control_plane.dispatch.retry_budget import RetryBudget
from control_plane.dispatch.submitter import Sender
from control_plane.dispatch.worker_call import Leg
from control_plane.routing.router import Route
from tandem_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class Mover:
    """Sends prompt and tokens so far to another decode worker, which goes on with the very next token."""

    def __init__(
        self,
        route: Callable[[Plan, Choice], Route],
        sender: Sender,
        waiting_room: WaitingRoom,
        budget: RetryBudget,
        queue_seconds: float,
    ) -> None:
        self._route = route
        self._sender = sender
        self._waiting_room = waiting_room
        self._budget = budget
        self._queue_seconds = queue_seconds

    async def move_or_fail(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None:
        """Move a choice that lost `leg` to `error`; the client hears of the error only if that cannot be done."""
        await plan.has_started.wait()
        if choice.leg is not leg or choice.is_over:  # the whole was tried again meanwhile
            return
        try:
            await self._move_when_there_is_room(plan, choice, leg, error)
        except Cancelled:
            log.debug("choice_ended_as_it_migrated", request_id=plan.request.request_id, choice=choice.index)
        except TandemError as refusal:
            log.warning("migration_failed", request_id=plan.request.request_id, error=refusal.message)
            plan.flight.fail(refusal if isinstance(refusal, DeadlineExceeded) else error)
        except Exception as bug:
            log.exception("migration_broke", request_id=plan.request.request_id)
            plan.flight.fail(InternalError(f"the answer could not go on after its worker was lost: {bug!r}"))

    async def _move_when_there_is_room(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None:
        """Move a choice now, or as soon as a worker has room for it or has come up again: the client sees a pause."""
        lost = set() if isinstance(error, Diverged) else {leg.link.worker.incarnation}
        deadline = min(plan.request.deadline, time.time() + self._queue_seconds)
        avoid = lost | choice.lost_with  # others first; once those are tried in vain, any but the last
        has_permit = False
        while not choice.is_over:
            plan.avoid, avoid = set(avoid), lost
            try:
                if not has_permit:
                    self._budget.take(is_first=choice.num_losses <= 1)
                    has_permit = True
                await self._move(plan, choice, error)
            except (Overloaded, Unavailable, ModelNotFound) as refusal:
                full = Overloaded(f"no decode worker can go on with the request: {refusal.message}")
                await self._waiting_room.wait(full, deadline - time.time(), in_front=True)
            else:
                self._waiting_room.next()
                return

    async def _move(self, plan: Plan, choice: Choice, error: TandemError) -> None:
        plan.attempt += 1
        log.warning(
            "choice_migrates",
            request_id=plan.request.request_id,
            choice=choice.index,
            num_tokens=len(choice.tokens),
            error=error.message,
        )
        last_refusal: TandemError = error
        route = self._route(plan, choice)
        for worker in route.decodes:
            if choice.is_over:
                return
            try:
                await self._sender.answer(plan, self._sender.send_choice(plan, choice, worker, route))
            except (Overloaded, Unavailable) as refusal:
                log.info("migration_refused", worker=worker.worker_id, error=refusal.message)
                last_refusal = refusal
            else:
                return
        raise last_refusal
