"""How are both halves of a request started, kept going and cleaned up after?"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from control_plane.flight import Choice, ChoiceSink, Flight, Leg, PrefillSink, tokens_in_flight
from control_plane.generation import TokenRequest
from control_plane.kv_clients import KvClients
from control_plane.links import LinkPool
from control_plane.registry import Worker, WorkerRegistry
from control_plane.router import Route, Router
from control_plane.secrets import cache_salt, handle_key
from control_plane.submission import Hashes, base_submit, decode_submit, hash_prompt, mint_handle, prefill_submit
from runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TandemError,
    Unavailable,
)
from runtime.log import get_logger
from runtime.tracing import current_traceparent, tracer
from tandem.v1 import types_pb2 as pb

log = get_logger(__name__)

_MAX_ATTEMPTS = 4
_FINAL: tuple[type[TandemError], ...] = (InvalidRequest, DeadlineExceeded, Cancelled)
"""What another worker would answer too."""


class Cards(Protocol):
    def card(self, name: str) -> pb.ModelCard:
        """Return the card of a served model; raises ModelNotFound."""


@dataclass(eq=False)
class _Plan:
    """What stays the same over all attempts of one request, and what was learnt from them."""

    request: TokenRequest
    card: pb.ModelCard
    hashes: Hashes | None
    traceparent: str
    flight: Flight
    avoid: set[str]
    attempt: int = 0
    handle: pb.KvHandle | None = None

    def base(self) -> pb.Submit:
        return base_submit(self.request, self.attempt, self.card, self.hashes, self.traceparent)


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
    ) -> None:
        self._registry = registry
        self._links = links
        self._router = router
        self._cards = cards
        self._kv_clients = kv_clients
        self._secret = secret
        self._handle_key = handle_key(secret)
        self._accept_seconds = accept_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: TokenRequest) -> Flight:
        """Start a request; returns once its decode workers have reserved their memory. Raises TandemError."""
        card = self._cards.card(request.model_id)
        hashes = await self._hash(request, card) if request.cacheable else None
        flight = Flight(request)
        plan = _Plan(request, card, hashes, current_traceparent(), flight, avoid=set())
        flight.on_close = lambda: self._abandon(plan)
        try:
            while not await self._attempt(plan):
                plan.attempt += 1
        except BaseException:
            await flight.aclose()
            raise
        return flight

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ starting

    async def _hash(self, request: TokenRequest, card: pb.ModelCard) -> Hashes:
        salt = cache_salt(self._secret, request.account) + request.salt
        return await asyncio.to_thread(hash_prompt, card, request.token_ids, salt)

    async def _attempt(self, plan: _Plan) -> bool:
        """Route and submit both halves; return False if another route should be tried."""
        with tracer().start_as_current_span("route") as span:
            route = self._route(plan)
            span.set_attributes({f"tandem.route.{name}": value for name, value in route.describe().items()})
        plan.flight.route = route.describe()
        plan.handle = self._handle(plan, route)
        answers = [asyncio.create_task(self._reserve(plan, choice, route)) for choice in plan.flight.choices]
        prefill_answer = self._start_prefill(plan, route) if route.prefill and plan.handle else None
        try:
            await asyncio.gather(*answers, *([prefill_answer] if prefill_answer else []))
        except TandemError as error:
            self._abandon(plan)
            await asyncio.gather(*answers, return_exceptions=True)
            self._learn(plan, error)
            return False
        finally:
            for answer in answers:
                answer.cancel()
        return True

    def _route(self, plan: _Plan) -> Route:
        return self._router.choose(
            plan.request.model_id, len(plan.request.token_ids), plan.request.sampling.max_tokens, plan.avoid
        )

    def _learn(self, plan: _Plan, error: TandemError) -> None:
        """Raise what no other worker would answer differently; else leave it to the next attempt."""
        log.info("attempt_refused", request_id=plan.request.request_id, attempt=plan.attempt, error=error.message)
        if isinstance(error, _FINAL) and not isinstance(error, ModelNotFound):
            raise error
        if plan.attempt + 1 >= _MAX_ATTEMPTS:
            raise error

    def _handle(self, plan: _Plan, route: Route) -> pb.KvHandle | None:
        if route.prefill is None:
            return None
        holders = self._registry.kv_services(route.prefill.info.host_id)
        if not holders:
            return None
        return mint_handle(plan.request, plan.attempt, plan.card, route.prefill, holders[0], self._handle_key)

    async def _start_prefill(self, plan: _Plan, route: Route) -> None:
        """Submit to prefill and wait for its word; raises TandemError if it refuses."""
        assert route.prefill is not None and plan.handle is not None, "checked by the caller"
        submit = prefill_submit(plan.base(), plan.request, plan.handle)
        leg = self._leg(route.prefill, submit, is_prefill=True)
        plan.flight.expect_prefill(leg)
        answered = asyncio.get_running_loop().create_future()
        leg.link.submit(submit, PrefillSink(plan.flight, answered, lambda error: self._prefill_failed(plan, error)))
        await self._answer(plan, answered, route.prefill)

    async def _reserve(self, plan: _Plan, choice: Choice, route: Route) -> None:
        """Submit a choice to the decode workers in order until one reserves its memory."""
        error: TandemError = Unavailable("no decode worker was asked")
        for worker in route.decodes:
            try:
                await self._submit_choice(plan, choice, worker, None if choice.tokens else plan.handle)
            except _FINAL:
                raise
            except TandemError as refusal:
                error = refusal
            else:
                return
        raise error

    async def _submit_choice(self, plan: _Plan, choice: Choice, worker: Worker, handle: pb.KvHandle | None) -> None:
        submit = decode_submit(plan.base(), plan.request, choice.index, handle, choice.tokens)
        leg = choice.leg = self._leg(worker, submit, is_prefill=False)
        answered = asyncio.get_running_loop().create_future()
        failed = lambda choice, leg, error: self._choice_failed(plan, choice, leg, error)  # noqa: E731
        leg.link.submit(submit, ChoiceSink(plan.flight, choice, leg, answered, failed))
        await self._answer(plan, answered, worker)

    async def _answer(self, plan: _Plan, answered: asyncio.Future[None], worker: Worker) -> None:
        """Wait for a worker's first word; one that refuses or stays silent is not asked again for this request."""
        try:
            async with asyncio.timeout(self._accept_seconds):
                await answered
        except TimeoutError as error:
            plan.avoid.add(worker.incarnation)
            raise Unavailable(
                f"worker {worker.worker_id} did not answer within {self._accept_seconds:g} s", retry_after_seconds=1.0
            ) from error
        except TandemError:
            plan.avoid.add(worker.incarnation)
            raise

    def _leg(self, worker: Worker, submit: pb.Submit, *, is_prefill: bool) -> Leg:
        num_tokens = len(submit.token_ids) + (0 if is_prefill else submit.sampling.max_tokens)
        give_back = tokens_in_flight(self._router.in_flight, worker.incarnation, num_tokens, is_prefill=is_prefill)
        try:
            link = self._links.get(worker)
        except TandemError:
            give_back()
            raise
        return Leg(link, submit, give_back)

    # ------------------------------------------------------------------------------------- failing and ending

    def _prefill_failed(self, plan: _Plan, error: TandemError) -> None:
        """Prefill broke after it had accepted: tell decode, through the handle, to compute the prompt itself."""
        log.warning("prefill_failed", request_id=plan.request.request_id, error=error.message)
        if plan.handle is not None:
            self._spawn(self._kv_clients.abort(plan.handle, error))

    def _choice_failed(self, plan: _Plan, choice: Choice, leg: Leg, error: TandemError) -> None:
        """A decode worker was lost: go on elsewhere from the next token, or tell the client."""
        if choice.is_over:
            return
        plan.avoid.add(leg.link.worker.incarnation)
        if isinstance(error, _FINAL) or plan.attempt + 1 >= _MAX_ATTEMPTS:
            plan.flight.fail(error)
            return
        self._spawn(self._migrate(plan, choice, error))

    async def _migrate(self, plan: _Plan, choice: Choice, error: TandemError) -> None:
        plan.attempt += 1
        log.warning(
            "choice_migrates",
            request_id=plan.request.request_id,
            choice=choice.index,
            num_tokens=len(choice.tokens),
            error=error.message,
        )
        if plan.handle is not None:
            reader_id = f"{plan.request.request_id}-{choice.index}"
            self._spawn(self._kv_clients.release(plan.handle, reader_id))
        try:
            route = self._route(plan)
            for worker in route.decodes:
                try:
                    await self._submit_choice(plan, choice, worker, None)
                except (Overloaded, Unavailable) as refusal:
                    log.info("migration_refused", worker=worker.worker_id, error=refusal.message)
                else:
                    return
            plan.flight.fail(error)
        except TandemError:
            plan.flight.fail(error)

    def _abandon(self, plan: _Plan) -> None:
        """Cancel every leg of an attempt, and give its handle back."""
        legs = [choice.leg for choice in plan.flight.choices] + [plan.flight.prefill]
        is_unfinished = plan.attempt > 0 or any(leg is not None and leg.is_open for leg in legs)
        for leg in legs:
            if leg is not None:
                leg.close(cancel=True)
        if is_unfinished and plan.handle is not None:
            self._spawn(self._kv_clients.release_all(plan.handle))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
