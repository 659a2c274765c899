"""What becomes of a request whose worker is lost while it runs there?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from control_plane.dispatch.migration import Mover
from control_plane.dispatch.quarantine import MAX_DEATHS, MAX_DEATHS_IN_A_ROW, Quarantine
from control_plane.dispatch.request_state import FINAL, MAX_ATTEMPTS, Plan
from control_plane.dispatch.request_stream import Choice, Diverged
from control_plane.dispatch.worker_call import Leg
from control_plane.fleet.kv_clients import KvClients
from control_plane.routing.router import Route
from tandem_runtime.errors import Draining, InternalError, TandemError, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Losses:
    """Recovers requests whose worker is lost. A draining worker is no loss; an unreachable one has died."""

    def __init__(
        self,
        mover: Mover,
        kv_clients: KvClients,
        quarantine: Quarantine,
        route: Callable[[Plan], Route],
        start_again: Callable[[Plan, str], Coroutine[Any, Any, None]],
        spawn: Spawn,
    ) -> None:
        self._mover = mover
        self._kv_clients = kv_clients
        self._quarantine = quarantine
        self._route = route
        self._start_again = start_again
        self._spawn = spawn

    def choice_failed(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None:
        """A decode worker was lost: go on elsewhere from the next token, or tell the client."""
        if choice.is_over:
            return
        if not isinstance(error, Diverged):  # that one may well go on, from the tokens that the client has
            plan.avoid.add(leg.link.worker.incarnation)
            choice.lost_with.add(leg.link.worker.incarnation)
        if (end := self._end_of(plan, choice, leg, error)) is not None:
            plan.flight.fail(end)
            return
        if plan.handle is not None:
            self._spawn(self._kv_clients.release(plan.handle, f"{plan.request.request_id}-{choice.index}"))
        self._until_the_end(plan, self._mover.move_or_fail(plan, choice, leg, error))

    def prefill_failed(self, plan: Plan, leg: Leg, error: TandemError) -> None:
        """Prefill broke after it had accepted: another one reads the prompt, or decode does, whichever is sooner."""
        log.warning("prefill_failed", request_id=plan.request.request_id, error=error.message)
        waiting = [choice for choice in plan.flight.choices if not choice.is_over and not choice.tokens]
        if isinstance(error, Unavailable) and any(self._is_deadly(choice, leg) for choice in waiting):
            plan.flight.fail(self._quarantine.put(plan.request))
            return
        self._until_the_end(plan, self._read_elsewhere(plan, leg, error))

    def _end_of(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> TandemError | None:
        """Count the loss of a decode worker; return what the request ends with, if this was one too many."""
        if isinstance(error, FINAL):
            return error
        if isinstance(error, Draining):
            return None
        choice.num_losses += 1
        if isinstance(error, Unavailable):
            return self._quarantine.put(plan.request) if self._is_deadly(choice, leg) else None
        return error if choice.num_losses >= MAX_ATTEMPTS else None

    def _is_deadly(self, choice: Choice, leg: Leg) -> bool:
        """Count a worker that died with a choice; return whether that were too many for a coincidence."""
        choice.deaths.add(leg.link.worker.incarnation)
        return len(choice.deaths) >= MAX_DEATHS_IN_A_ROW or choice.num_losses >= MAX_DEATHS

    async def _read_elsewhere(self, plan: Plan, leg: Leg, error: TandemError) -> None:
        await plan.has_started.wait()
        if plan.flight.prefill is not leg or plan.handle is None:  # the whole was tried again meanwhile
            return
        incarnation = leg.link.worker.incarnation
        plan.avoid.add(incarnation)
        if isinstance(error, FINAL) or plan.has_started_anew or not self._another_is_sooner(plan):
            await self._kv_clients.abort(plan.handle, error)  # tells decode to compute the prompt itself
            return
        plan.has_started_anew = True
        try:
            await self._start_again(plan, incarnation)
        except TandemError as refusal:
            plan.flight.fail(refusal)
        except Exception as bug:
            log.exception("starting_again_broke", request_id=plan.request.request_id)
            plan.flight.fail(InternalError(f"the request could not go on after its worker was lost: {bug!r}"))

    def _another_is_sooner(self, plan: Plan) -> bool:
        """Whether to begin anew with another prefill worker; only if no choice has got anywhere yet."""
        running = [choice for choice in plan.flight.choices if not choice.is_over]
        if not running or not all(_only_waits(choice) for choice in running):
            return False
        try:
            return self._route(plan).prefill is not None
        except TandemError:
            return False

    def _until_the_end(self, plan: Plan, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with the request at the latest."""
        task = self._spawn(coroutine)
        plan.migrations.add(task)
        task.add_done_callback(plan.migrations.discard)


def _only_waits(choice: Choice) -> bool:
    """Whether a choice is at its first decode worker, which waits for the prompt's cache."""
    leg = choice.leg
    return not choice.tokens and leg is not None and leg.is_open and leg.submit.HasField("handle")
