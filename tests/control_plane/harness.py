"""A dispatcher over scripted workers, for the tests of what it does with them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from control_plane.dispatch.admission import RetryBudget
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.fleet.worker_links import LinkPool
from control_plane.generation import TokenRequest
from control_plane.routing.router import Router
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import Overloaded, TandemError
from tests.control_plane.routing.first_choice import FirstChoice
from tests.control_plane.scripted_worker import (
    DECODE,
    FINGERPRINT,
    MODEL,
    PREFILL,
    ScriptedWorker,
    kv_load,
    kv_service,
    token_at,
)
from tests.tandem_worker.kv_harness import until

FULL = Overloaded("12 KV blocks are needed, 3 are available", retry_after_seconds=1.0)
PROMPT = tuple(range(40))
SECRET = b"s" * 32


class RecordedKv:
    """The gateway's KV clients, which only record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def release_all(self, handle: pb.KvHandle, seconds_left: float) -> None:
        self.calls.append("release_all")

    async def release(self, handle: pb.KvHandle, reader_id: str, seconds_left: float) -> None:
        self.calls.append(f"release {reader_id}")

    async def abort(self, handle: pb.KvHandle, reason: TandemError, seconds_left: float) -> None:
        self.calls.append("abort")


class Harness:
    def __init__(
        self,
        queue_seconds: float,
        local_prefill: Literal["auto", "never"],
        budget: RetryBudget | None,
        accept_seconds: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 8,
    ) -> None:
        self.registry = WorkerRegistry(3.0, 5.0)
        self.links = LinkPool(self.registry, "gateway", "gateway-life")
        self.health = WorkerHealth(self.registry, clock)
        self.router = Router(self.registry, local_prefill, rng=FirstChoice(), health=self.health)
        self.kv = RecordedKv()
        self.proofs = ReadinessProofs(self.registry)
        self._queue_seconds, self._accept_seconds, self._max_waiting = queue_seconds, accept_seconds, max_waiting
        self.dispatcher = self.new_dispatcher(self.router, budget)
        self.workers: list[ScriptedWorker] = []

    def new_dispatcher(self, router: Router, budget: RetryBudget | None = None) -> Dispatcher:
        return Dispatcher(
            self.registry,
            self.links,
            router,
            self,
            cast(KvClients, self.kv),
            SECRET,
            accept_seconds=self._accept_seconds,
            queue_seconds=self._queue_seconds,
            max_waiting=self._max_waiting,
            budget=budget,
            proofs=self.proofs,
        )

    def card(self, name: str) -> pb.ModelCard:
        fingerprint = pb.Fingerprint(digest=FINGERPRINT, numerics_class="cpu/float32/lean")
        return pb.ModelCard(model_id=name, fingerprint=fingerprint, block_size=16, context_length=512)

    async def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        self.workers.append(await worker.start())
        worker.register(self.registry)
        await until(lambda: worker.incarnation in self.links.attached)
        return worker

    def report(self, worker: ScriptedWorker, **load: Any) -> None:
        """Take in a heartbeat of the worker: what has refused may have room again."""
        info = worker.info()
        beat = cp.HeartbeatRequest(worker_id=info.worker_id, incarnation=info.incarnation, kv_address=info.kv_address)
        beat.load.CopyFrom(worker.load(**load))
        assert self.registry.heartbeat(beat)

    def nothing_is_left(self) -> bool:
        links = [self.links.get(worker) for worker in self.registry.workers(DECODE)]
        links += [self.links.get(worker) for worker in self.registry.workers(PREFILL)]
        return self.router.in_flight.total() == 0 and not any(link.num_requests for link in links)


@asynccontextmanager
async def harness(
    *workers: ScriptedWorker,
    queue_seconds: float = 0.0,
    local_prefill: Literal["auto", "never"] = "never",
    budget: RetryBudget | None = None,
    accept_seconds: float = 0.3,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Harness]:
    """A dispatcher with these workers and a KV service; checks at the end that nothing is in flight.

    `clock`: of the workers' health.
    """
    here = Harness(queue_seconds, local_prefill, budget, accept_seconds, clock)
    here.registry.register(kv_service(), kv_load())
    for worker in workers:
        await here.add(worker)
    try:
        yield here
        assert here.nothing_is_left()
    finally:
        await here.dispatcher.close()
        await here.links.close()
        for worker in here.workers:
            await worker.kill()


def new_request(max_tokens: int = 5, num_choices: int = 1, **fields: Any) -> TokenRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "account": "me",
        "model_id": MODEL,
        "token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0),
        "choice_seeds": tuple(range(num_choices)),
        "deadline": time.monotonic() + 20,
    }
    return TokenRequest(**{**values, **fields})


def answer(max_tokens: int = 5) -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(max_tokens)]


async def tokens_of(stream: RequestStream) -> list[list[int]]:
    choices: list[list[int]] = [[] for _ in stream.state.choices]
    async for delta in stream:
        choices[delta.choice_index].extend(delta.token_ids)
    return choices
