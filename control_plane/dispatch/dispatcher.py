"""How are both halves of a request started, kept going and cleaned up after?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from control_plane.cache_policy import AccountPolicies
from control_plane.dispatch.admission import WaitingRoom
from control_plane.dispatch.block_hashes import PromptHasher
from control_plane.dispatch.migration import Mover
from control_plane.dispatch.quarantine import Quarantine
from control_plane.dispatch.recovery import Losses
from control_plane.dispatch.request_state import FINAL, Plan
from control_plane.dispatch.request_stream import MAX_UNREAD_TOKENS, Choice, Flight
from control_plane.dispatch.retry_budget import RetryBudget
from control_plane.dispatch.route_feedback import Lessons
from control_plane.dispatch.submission import mint_handle
from control_plane.dispatch.submitter import Sender
from control_plane.dispatch.wakeups import Pace
from control_plane.dispatch.worker_call import Leg
from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.registry import RESTART_SECONDS, WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from control_plane.generation import TokenRequest
from control_plane.routing.router import Route, Router
from control_plane.routing.session_affinity import Served
from control_plane.secrets import handle_key
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    ModelNotFound,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem_runtime.log import get_logger
from tandem_runtime.tracing import current_traceparent, tracer

log = get_logger(__name__)


class Cards(Protocol):
    def card(self, name: str) -> pb.ModelCard:
        """Return the card of a served model; raises ModelNotFound."""


class Dispatcher:
    """Implements control_plane.generation.Dispatcher over the registered workers."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: LinkPool,
        router: Router,
        cards: Cards,
        kv_clients: KvClients,
        secret: bytes,
        accept_seconds: float,
        queue_seconds: float,
        max_waiting: int,
        budget: RetryBudget | None = None,
        accounts: AccountPolicies | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
    ) -> None:
        self._registry = registry
        self._max_unread_tokens = max_unread_tokens
        self._pace = Pace()
        self.router = router
        self._cards = cards
        self._kv_clients = kv_clients
        self._hasher = PromptHasher(secret, accounts or AccountPolicies())
        self._handle_key = handle_key(secret)
        self._sender = Sender(links, router.in_flight, accept_seconds, self)
        self._queue_seconds = queue_seconds
        self.waiting_room = WaitingRoom(max_waiting)
        self.quarantine = Quarantine()
        self.budget = budget or RetryBudget()
        self._lessons = Lessons(registry, router)
        mover = Mover(self._route_of, self._sender, self.waiting_room, self.budget, queue_seconds)
        self._losses = Losses(mover, kv_clients, self.quarantine, self._route, self._start_again, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self.proven: Callable[[str, bool], None] = lambda model_id, handed_over: None
        """Told the model of every request that went the whole way."""

    async def submit(self, request: TokenRequest) -> Flight:
        """Start a request; returns once its decode workers have reserved their memory.

        While every worker is full it waits at the door, in order, unless it asks not to. Raises TandemError.
        """
        self.quarantine.check(request)
        self.budget.earn()
        card = self._cards.card(request.model_id)
        hashes = await self._hasher.hashes(request, card)
        flight = Flight(request, self._pace, self._max_unread_tokens)
        plan = Plan(request, card, hashes, current_traceparent(), flight, avoid=set())
        flight.on_close = lambda: self._end(plan)
        flight.on_finished = lambda: self._finished(plan)
        flight.on_prompt_read = lambda leg: self._lessons.prompt_read(plan, leg)
        flight.on_ledger = lambda leg, ledger: self._lessons.ledger_came(plan, leg, ledger)
        try:
            await self._enter(plan)
        except BaseException:
            await flight.aclose()
            raise
        return flight

    @property
    def background(self) -> frozenset[asyncio.Task[None]]:
        """What still runs by itself: releases and migrations."""
        return frozenset(self._tasks)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ starting

    async def _enter(self, plan: Plan) -> None:
        """Start the request as soon as there is room, behind those who came before."""
        deadline = self._deadline(plan)
        if len(self.waiting_room) and not plan.request.reject_if_busy:
            busy = Overloaded("requests before this one wait for room; try again later", retry_after_seconds=1.0)
            await self.waiting_room.wait(busy, deadline - time.time(), in_front=False)
        await self._start_when_there_is_room(plan, deadline, is_first=True)

    async def _start_again(self, plan: Plan, avoid: str) -> None:
        """Begin anew, before those who wait at the door; a worker that was lost is not to be asked at first."""
        self._abandon(plan)
        plan.start_over()
        plan.avoid.add(avoid)
        plan.needs_permit = True
        await self._start_when_there_is_room(plan, self._deadline(plan), is_first=False)

    def _deadline(self, plan: Plan) -> float:
        """Return until when a request may wait at the door."""
        return min(plan.request.deadline, time.time() + self._queue_seconds)

    async def _start_when_there_is_room(self, plan: Plan, deadline: float, *, is_first: bool) -> None:
        restarted = min(deadline, time.time() + RESTART_SECONDS)
        while True:
            try:
                await self._start(plan)
            except (Overloaded, Unavailable) as refusal:
                if plan.request.reject_if_busy:
                    raise
                until = deadline if isinstance(refusal, Overloaded) else restarted
                await self.waiting_room.wait(refusal, until - time.time(), in_front=not is_first)
                is_first = False
                plan.start_over()
            else:
                plan.started()
                self._remember(plan)
                self.waiting_room.next()
                return

    async def _start(self, plan: Plan) -> None:
        """Try routes until both halves are taken; raises what the last one said."""
        while not await self._attempt(plan):
            plan.attempt += 1

    async def _attempt(self, plan: Plan) -> bool:
        """Route and submit both halves; return False if another route should be tried."""
        if plan.needs_permit:
            self.budget.take(is_first=plan.num_resends == 0)
            plan.num_resends += 1
            plan.needs_permit = False
        with tracer().start_as_current_span("route") as span:
            route = self._start_route(plan)
            span.set_attributes({f"tandem.route.{name}": value for name, value in route.describe().items()})
        plan.flight.route = route.describe()
        plan.handle = self._handle(plan, route)
        try:
            await self._both_halves(plan, route)
        except TandemError as error:
            self._abandon(plan)
            self._learn(plan, error)
            return False
        return True

    async def _both_halves(self, plan: Plan, route: Route) -> None:
        """Submit both halves at once and wait until both are taken; raises TandemError.

        Everything is sent before anything is awaited, so that the next request's route counts this one.
        """
        choices = [choice for choice in plan.flight.choices if not choice.is_over]  # over: prefill had its only token
        legs = [self._sender.send_choice(plan, choice, route.decodes[0], route) for choice in choices]
        prefill = None
        if route.prefill is not None and plan.handle is not None:
            prefill = self._sender.send_prefill(plan, route.prefill, plan.handle, route)
        waits = [self._reserve(plan, choice, leg, route) for choice, leg in zip(choices, legs, strict=True)]
        if prefill is not None:
            waits.append(self._sender.answer(plan, prefill))
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_route(self, plan: Plan) -> Route:
        """Return where to try next; once all have refused, raises what the first that was full said."""
        try:
            route = self._route(plan)
        except Overloaded:
            raise plan.refusal or Overloaded("every worker refused; try again", retry_after_seconds=1.0) from None
        except ModelNotFound as error:  # it was served when the request came: all who did are gone, and may be back
            raise Unavailable(error.message, retry_after_seconds=2.0) from error
        if plan.request.reject_if_busy and self.router.is_busy(route.decodes):
            raise Overloaded("every decode worker is busy, and the request asks not to wait", retry_after_seconds=1.0)
        return route

    def _route(self, plan: Plan) -> Route:
        return self.router.choose(plan.ask(), plan.avoid)

    def _route_of(self, plan: Plan, choice: Choice) -> Route:
        return self.router.choose(plan.ask_for(choice), plan.avoid)

    def _remember(self, plan: Plan) -> None:
        legs = plan.flight.prefill, plan.flight.choices[0].leg
        served = Served(*(leg.link.worker.incarnation if leg else "" for leg in legs))
        self.router.affinity.remember(plan.request.session_affinity, served)

    def _learn(self, plan: Plan, error: TandemError) -> None:
        """Raise what no other worker would answer differently; else leave it to the next attempt."""
        plan.learn(error)
        plan.needs_permit = not isinstance(error, Overloaded)
        log.info("attempt_refused", request_id=plan.request.request_id, attempt=plan.attempt, error=error.message)
        if isinstance(error, FINAL) and not isinstance(error, ModelNotFound):
            raise error
        if plan.is_last_attempt:
            raise plan.refusal or error

    def _handle(self, plan: Plan, route: Route) -> pb.KvHandle | None:
        """Return a handle at the KV service that prefill uses; None without one, or if all of token one came before."""
        if route.prefill is None or all(choice.tokens for choice in plan.flight.choices):
            return None
        address = route.prefill.info.kv_address
        holders = [kv for kv in self._registry.kv_services(route.prefill.info.host_id) if kv.address == address]
        if not holders:
            return None
        return mint_handle(plan.request, plan.attempt, plan.card, route.prefill, holders[0], self._handle_key)

    async def _reserve(self, plan: Plan, choice: Choice, leg: Leg, route: Route) -> None:
        """Wait for the first decode worker's word; if it refuses, ask the others in order."""
        for following in (*route.decodes[1:], None):
            try:
                await self._sender.answer(plan, leg)
            except FINAL:
                raise
            except TandemError as refusal:
                if choice.is_over:  # prefill's first token was its last
                    return
                plan.learn(refusal)
                if following is None:
                    raise
                leg = self._sender.send_choice(plan, choice, following, route)
            else:
                return

    # ------------------------------------------------------------------------------------- failing and ending

    def prefill_failed(self, plan: Plan, leg: Leg, error: TandemError) -> None:
        self._losses.prefill_failed(plan, leg, error)

    def choice_failed(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None:
        self._losses.choice_failed(plan, choice, leg, error)

    def _abandon(self, plan: Plan) -> None:
        """Cancel every leg of an attempt, and give its handle back."""
        legs = [choice.leg for choice in plan.flight.choices] + [plan.flight.prefill]
        is_unfinished = plan.attempt > 0 or any(leg is not None and leg.is_open for leg in legs)
        for leg in legs:
            if leg is not None:
                leg.close(cancel=True)
        plan.flight.expect_prefill(None)
        if is_unfinished and plan.handle is not None:
            self._spawn(self._kv_clients.release_all(plan.handle))

    def _finished(self, plan: Plan) -> None:
        self._lessons.finished(plan.flight)
        ledgers = [choice.ledger for choice in plan.flight.choices]
        if all(ledger is not None for ledger in ledgers):  # else prefill alone had it all
            handed_over = all(ledger is not None and ledger.transfer_end_ns > 0 for ledger in ledgers)
            self.proven(plan.request.model_id, handed_over)

    def _end(self, plan: Plan) -> None:
        for migration in plan.migrations:
            migration.cancel()
        self._lessons.ended(plan)
        self._abandon(plan)
        self.waiting_room.next()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
