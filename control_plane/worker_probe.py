"""Proves one worker: sends a small request through every phase, with this worker in its own role."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass

from control_plane.dispatch.dispatcher import Dispatcher, ModelCards
from control_plane.fleet.draining import WorkerDrain
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.status import worker_name
from control_plane.generation import NOTHING, TokenIds, TokenRequest
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Route, Router
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

PROBE_SECONDS = 20.0
_PROMPT_TOKENS = 20
_ANSWER_TOKENS = 2
_probed: ContextVar[Worker] = ContextVar("_probed")
"""The worker that this task, and those that it starts, probe."""


@dataclass(frozen=True)
class Probed:
    """The result of one probe."""

    worker: Worker
    name: str
    """Its --worker-id."""
    reason: str
    """Why the worker is not proven; "" if it is."""
    seconds: float
    partner: str = ""
    """The other half's worker; "" if there was none."""

    @property
    def is_proven(self) -> bool:
        return not self.reason


class WorkerProbe:
    """Sends probes to single workers. A probe waits in no queue, and neither uses nor leaves cached blocks."""

    def __init__(
        self,
        registry: WorkerRegistry,
        drain: WorkerDrain,
        cards: ModelCards,
        new_dispatcher: Callable[[Router], Dispatcher],
        encoders: EncoderClients,
    ) -> None:
        """`new_dispatcher` returns a dispatcher over the gateway's links that takes its routes from a router."""
        self._registry = registry
        self._drain = drain
        self._cards = cards
        self._new_dispatcher = new_dispatcher
        self._dispatcher: Dispatcher | None = None
        """Of all probes: what routes a request listens to every worker for good."""
        self._encoders = encoders

    async def close(self) -> None:
        """Wait for what probes have left to do."""
        if self._dispatcher is not None:
            await self._dispatcher.close()

    async def probe(self, name: str) -> Probed:
        """Probe the worker with this id or --worker-id. Raise NoSuchThing or InvalidRequest as a drain does."""
        worker = self._drain.find(name)
        started, partner, reason = time.monotonic(), "", self._not_usable(worker)
        if not reason:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    partner = await self._send(worker)
            except TandemError as error:
                reason = error.message
            except TimeoutError:
                reason = f"the probe did not come back within {PROBE_SECONDS:g} s"
        seconds = time.monotonic() - started
        if reason:
            log.warning("worker_probe_failed", worker=worker.worker_id, error=reason)
        else:
            log.info("worker_proven", worker=worker.worker_id, partner=partner, seconds=round(seconds, 3))
        return Probed(worker, worker_name(worker.info), reason, seconds, partner)

    def _not_usable(self, worker: Worker) -> str:
        if worker.apart_for:
            return f"it gets no requests: it differs from the model's other workers in {worker.apart_for}"
        if worker.is_usable:
            return ""
        state = pb.WorkerState.Name(worker.load.state).removeprefix("WORKER_STATE_").lower()
        details = worker.load.error or worker.load.load_stage.replace("_", " ")
        return "its heartbeats are missing" if worker.is_suspected else f"it is {state}{details and f': {details}'}"

    async def _send(self, worker: Worker) -> str:
        """Send one probe; return the other half's worker. Raise TandemError if it does not come back whole."""
        if worker.role == pb.WORKER_ROLE_ENCODE:
            return await self._encode(worker)
        if self._dispatcher is None:
            self._dispatcher = self._new_dispatcher(OneWorkerRouter(self._registry))
        request = _request(self._cards.card(worker.info.card.model_id))
        token = _probed.set(worker)
        try:
            stream = await self._dispatcher.submit(request)
            try:
                num_tokens = sum([len(delta.token_ids) async for delta in stream])
            finally:
                await stream.aclose()
        finally:
            _probed.reset(token)
        if num_tokens != request.sampling.max_tokens:
            raise Unavailable(f"the probe came back with {num_tokens} of {request.sampling.max_tokens} tokens")
        route = stream.route
        return str(route["decode"] if worker.role == pb.WORKER_ROLE_PREFILL else route["prefill"])

    async def _encode(self, worker: Worker) -> str:
        card = worker.info.card
        ids = TokenIds(
            token_id % max(1, card.vocab_size) for token_id in range(min(_PROMPT_TOKENS, card.context_length))
        )
        request = pb.EncodeRequest(
            request_id=_new_id(),
            attempt=1,
            model=pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest),
            inputs=[pb.EncodeInput(token_ids=ids.packed())],
            time_left_ms=int(PROBE_SECONDS * 1000),
        )
        reply = await self._encoders.stub(worker).Encode(request, timeout=PROBE_SECONDS)
        if not reply.values:
            raise Unavailable("the probe came back without values")
        return ""


class OneWorkerRouter(Router):
    """Routes as the router does, but avoids the other workers of the role of the one that is probed."""

    def choose(self, request: RoutingRequest, avoid: Collection[str] = ()) -> Route:
        """Return a route with the worker; raise TandemError if there is none."""
        worker = _probed.get()
        peers = {each.incarnation for each in self._registry.workers(worker.role)} - {worker.incarnation}
        route = super().choose(request, {*avoid, *peers})
        if worker.role == pb.WORKER_ROLE_PREFILL and route.prefill is not self._registry.get(worker.worker_id):
            raise Unavailable("its KV blocks cannot reach a decode worker: " + route.reason)
        return route


def _request(card: pb.ModelCard) -> TokenRequest:
    num_tokens = max(1, min(_PROMPT_TOKENS, card.context_length - _ANSWER_TOKENS))
    return TokenRequest(
        request_id=_new_id(),
        account="",
        model_id=card.model_id,
        token_ids=tuple(token_id % max(1, card.vocab_size) for token_id in range(num_tokens)),
        sampling=SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0),
        choice_seeds=(0,),
        deadline=time.monotonic() + PROBE_SECONDS,
        cache=NOTHING,
        reject_if_busy=True,
        is_probe=True,
    )


def _new_id() -> str:
    return f"probe-{uuid.uuid4().hex[:12]}"
