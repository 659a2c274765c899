"""Takes in requests, and ends each of them with its tokens or an error, with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from control_plane.admission.budgets import BudgetTable
from control_plane.admission.model_admission import Waiter
from control_plane.dispatch.admission import Quarantine, RetryBudget
from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.dispatch.block_hashes import PromptHasher
from control_plane.dispatch.recovery import Recovery
from control_plane.dispatch.request_starter import RequestStarter
from control_plane.dispatch.request_state import MAX_UNREAD_TOKENS, RequestState
from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.room_keeper import RoomKeeper
from control_plane.dispatch.route_feedback import ReadinessProofs, RouteFeedback
from control_plane.dispatch.stall_watch import StallWatch
from control_plane.dispatch.submitter import Submitter
from control_plane.dispatch.trials import Trials
from control_plane.dispatch.wakeups import WakeupScheduler
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from control_plane.generation import DEFAULT_GRAIN, AccountPolicies, TokenRequest
from control_plane.routing.router import Router
from control_plane.secrets import handle_signer
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ModelNotFound, TandemError
from tandem_runtime.tasks import TaskSet
from tandem_runtime.tracing import current_traceparent


class ModelCards(Protocol):
    def card(self, name: str) -> pb.ModelCard:
        """Return the card of a served model; raises ModelNotFound."""


class Dispatcher:
    """Implements control_plane.generation.Dispatcher over the registered workers, and observes its requests."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: LinkPool,
        router: Router,
        cards: ModelCards,
        kv_clients: KvClients,
        secret: bytes,
        accept_seconds: float,
        queue_seconds: float,
        max_waiting: int,
        max_waiting_per_account: int = 0,
        budget: RetryBudget | None = None,
        accounts: AccountPolicies | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        proofs: ReadinessProofs | None = None,
        macs_until: float = 0.0,
        grain: int = DEFAULT_GRAIN,
        budgets: BudgetTable | None = None,
        reports_waiting: bool = True,
    ) -> None:
        """`proofs`: where requests that have gone the whole way are recorded. `macs_until`: see `handle_signer`.

        `reports_waiting`: workers hear what waits here; false for a second dispatcher on the same links.

        `grain`: tokens per hash of a prompt. `budgets` bound the predicted wait and the time per token of each model.
        """
        budgets = budgets or BudgetTable({})
        self._cards = cards
        self._hasher = PromptHasher(secret, accounts or AccountPolicies(), grain)
        self._max_unread_tokens = max_unread_tokens
        self._proofs = proofs
        self._wakeups = WakeupScheduler()
        self._states: set[RequestState] = set()
        self._stopped: Callable[[], TandemError] | None = None
        self._queue_error: TandemError | None = None
        self._tasks = TaskSet()
        self.router = router
        self._queue_seconds = queue_seconds
        self.queue = AdmissionQueue(max_waiting, queue_seconds, max_waiting_per_account, budgets=budgets)
        self.quarantine = Quarantine()
        self.budget = budget or RetryBudget()
        self._feedback = RouteFeedback(registry, router)
        signer = handle_signer(secret, macs_until)
        router.health.ask_links(links.attached)
        links.listen(router.health.stream_broke)
        self._stalls = StallWatch(router.health)
        self._rooms = RoomKeeper(registry, links, router, self.queue, budgets, reports_waiting=reports_waiting)
        submitter = Submitter(
            registry, links, router, self._feedback, accept_seconds, signer, self._stalls, self._rooms
        )
        trials = Trials(router, submitter, kv_clients, self._tasks)
        self._starter = RequestStarter(
            router,
            submitter,
            self._feedback,
            self.queue,
            self._rooms,
            self.budget,
            kv_clients,
            self._tasks,
            trials.started,
        )
        self._recovery = Recovery(
            router,
            self._starter,
            submitter,
            self.queue,
            self._rooms,
            self.budget,
            self.quarantine,
            kv_clients,
            self._tasks,
        )

    async def submit(self, request: TokenRequest) -> RequestStream:
        """Start a request; return once its decode workers have reserved their memory. Raises TandemError.

        While every worker of its model is full the request waits in the model's room, unless `reject_if_busy` is set.
        """
        self._check_stopped()  # its text was prepared meanwhile
        self.quarantine.check(request)
        self.budget.earn()
        card = self._cards.card(request.model_id)
        _check_adapter(request, card)
        hashes = await self._hasher.hashes(request, card)
        self._check_stopped()
        state = RequestState(
            request,
            card,
            hashes,
            self,
            traceparent=current_traceparent(),
            wakeups=self._wakeups,
            max_unread_tokens=self._max_unread_tokens,
        )
        self._states.add(state)
        try:
            await self._starter.start(state)
        except BaseException as error:
            state.close()
            if error is self._queue_error:  # all that waited have this one
                self._check_stopped()
            raise
        return RequestStream(state)

    @property
    def rooms(self) -> RoomKeeper:
        """What is known of the workers' room."""
        return self._rooms

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait for room, of whichever model."""
        return bool(len(self.queue))

    def refuse_early(self, model_id: str, account: str, service_class: int, session: str, num_bytes: int) -> None:
        """Raise Overloaded for a body of so many bytes whose request would not be let in in time."""
        if not self.queue.num_waiting(model_id):
            return
        room = self.queue.room(model_id)
        num_tokens = num_bytes / room.prices.bytes_per_token
        num_missing = num_tokens * (1 - room.cached.of(account, session))
        cost_ms = room.prices.request_ms(num_missing, room.prices.answer_tokens)
        waiter = Waiter(model_id, account, service_class, num_tokens=int(num_tokens), cost_ms=cost_ms)
        self.queue.refuse_early(waiter, self._queue_seconds)

    def body_prepared(self, model_id: str, num_bytes: int, num_tokens: int) -> None:
        """Learn how many bytes of a model's bodies make a token."""
        self.queue.room(model_id).prices.prepared(num_bytes, num_tokens)

    @property
    def background(self) -> frozenset[asyncio.Task[Any]]:
        """The background tasks that still run: releases of KV handles, and recoveries."""
        return frozenset(self._tasks)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._states)

    def stop(self, error: Callable[[], TandemError]) -> None:
        """End all requests with an error, after the tokens that their readers have not yet taken; refuse later ones.

        Each request has an error of its own: what is noted on one, such as work that was billed, is not another's.
        """
        self._stopped = error
        self._queue_error = error()
        self.queue.close(self._queue_error)
        for state in tuple(self._states):
            state.fail(error())

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped()

    async def close(self) -> None:
        self._stalls.close()
        self._rooms.close()
        await self._tasks.join()

    # ------------------------------------------------------------------------ what requests report (RequestObserver)

    def call_failed(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        self._recovery.recover(state, call, error)

    def finished(self, state: RequestState) -> None:
        self._feedback.finished(state)
        ledgers = [choice.ledger for choice in state.choices]
        if self._proofs is not None and all(ledger is not None for ledger in ledgers):  # else prefill did everything
            handed_over = all(ledger is not None and ledger.transfer_end_ns > 0 for ledger in ledgers)
            self._proofs.record(state.request.model_id, handed_over, state.refusal if state.request.is_probe else None)

    def closed(self, state: RequestState) -> None:
        self._states.discard(state)
        self._feedback.closed(state)
        self._starter.abandon(state)
        state.settle()
        self._learn(state)
        self.queue.release_next(state.request.model_id)

    def _learn(self, state: RequestState) -> None:
        """Remember how long answers are, and how much of their prompts was cached. Probes tell nothing."""
        room, request = self.queue.room(state.request.model_id), state.request
        if request.is_probe:
            return
        lengths = [len(choice.tokens) for choice in state.choices if choice.tokens]
        for num_tokens in lengths:
            room.prices.answered(num_tokens)
        if lengths and (usage := state.usage).num_cached_tokens + usage.num_computed_tokens:
            num_cached = usage.num_cached_tokens
            room.cached.finished(request.account, request.session_affinity, num_cached, usage.num_prompt_tokens)


def _check_adapter(request: TokenRequest, card: pb.ModelCard) -> None:
    """Raise ModelNotFound for an adapter that the model's workers have lost since the prompt was prepared."""
    adapter = request.adapter
    if adapter is not None and pb.Adapter(name=adapter.name, digest=adapter.digest) not in card.adapters:
        message = f"the workers of {card.model_id} have adapter {adapter.name!r} no longer; send the request again"
        raise ModelNotFound(message, field="model")
