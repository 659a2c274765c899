"""One encode worker and some gateways in this process: real gRPC, the real queue of the engine, and a model of a known
speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import grpc
import numpy as np

from control_plane.dispatch.encoding import EncodingDispatch
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.generation import EncoderFacts, EncoderInput, EncodingRequest, TokenIds
from encode_svc.front import EncodeFront
from encode_svc.service import EncodeService
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.encoder import batch
from tandem_engine.encoder.core import EncoderCore
from tandem_engine.encoder.messages import EncoderInfo, EncoderReady
from tandem_runtime.interceptors import ErrorInterceptor
from tandem_runtime.kv.spaces import model_identity
from tandem_worker.model_card import AssetStore, encoder_card
from tests.control_plane.api.model import description
from tests.tandem_worker import scripted_engine
from tests.tandem_worker.scripted_engine import ScriptedEngine

READY = EncoderReady(scripted_engine.ready().model, EncoderInfo("text-embedding", 1, [], "mean", True, False))
CARD = encoder_card(READY)
MODEL = description(
    model_id=CARD.model_id,
    identity=model_identity(CARD.fingerprint).hex(),
    task="text-embedding",
    encoder=EncoderFacts(1, (), "mean", True),
)


class PacedEngine(ScriptedEngine):
    """The queue and the steps of an encoder's engine, whose model computes so many tokens a second."""

    vocab_size, context_length, info = 1 << 16, 1 << 16, READY.encoder

    def __init__(self, tokens_per_second: float, step_tokens: int, max_calls: int) -> None:
        super().__init__()
        self.core = EncoderCore(self, step_tokens, max_calls)
        self.answer = self._take
        self.most_tokens = 0
        """That were here at once."""
        self._seconds_per_token = 1 / tokens_per_second
        self._step: asyncio.TimerHandle | None = None
        self.emit(READY)

    def encode(self, inputs: Sequence[batch.EncoderInput]) -> batch.Values:
        return np.array([[each.token_ids[0]] for each in inputs], np.float32)

    def _take(self, command: Any) -> None:
        for event in self.core.handle_some(command):
            self.emit(event)
        self.most_tokens = max(self.most_tokens, self.core.queue.num_tokens)
        self._begin()

    def _begin(self) -> None:
        if self._step is None and self.core.has_work():
            events: list[Any] = []
            before = self.core.stats().counters["encoded_tokens"]
            self.core.run_step(events.append)
            seconds = (self.core.stats().counters["encoded_tokens"] - before) * self._seconds_per_token
            self._step = asyncio.get_running_loop().call_later(seconds, self._end, events)

    def _end(self, events: Sequence[Any]) -> None:
        self._step = None
        for event in events:
            self.emit(event)
        self._begin()

    @property
    def num_refused(self) -> float:
        return self.core.stats().counters["refused_calls"]


class OneWorker:
    def __init__(self, engine: PacedEngine, server: grpc.aio.Server, front: EncodeFront) -> None:
        self.engine = engine
        self.server = server
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self.front = front

    def info(self) -> pb.WorkerInfo:
        role = pb.WORKER_ROLE_ENCODE
        return pb.WorkerInfo(worker_id="e", incarnation="e-1", role=role, address=self.address, card=CARD)


@asynccontextmanager
async def one_worker(
    tokens_per_second: float = 400_000,
    step_tokens: int = 2_048,
    max_calls: int = 256,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[OneWorker]:
    """Yield an encode worker; its engine's steps take as long as a model of that speed."""
    engine = PacedEngine(tokens_per_second, step_tokens, max_calls)
    front = EncodeFront(engine, max_calls=max_calls, step_tokens=step_tokens)
    is_ready = asyncio.Event()
    front.when_ready(lambda paths: is_ready.set())
    pump = asyncio.create_task(front.pump())
    await asyncio.wait_for(is_ready.wait(), 10)
    server = grpc.aio.server(interceptors=[*interceptors, ErrorInterceptor()])
    service = EncodeService(front, "e-1", AssetStore(), pb.WorkerInfo)
    worker_pb2_grpc.add_EncodeServiceServicer_to_server(service, server)
    here = OneWorker(engine, server, front)
    await server.start()
    try:
        yield here
    finally:
        await front.end_streams(1.0)
        await server.stop(1.0)
        await front.close()
        await pump


class Gateway:
    """What a gateway needs to encode texts."""

    def __init__(self, worker: OneWorker) -> None:
        self.registry = WorkerRegistry(1e6, 1e6)
        self.clients = EncoderClients(self.registry)
        self.dispatch = EncodingDispatch(self.registry, self.clients, 60.0, 4_096)
        self.registry.register(worker.info(), pb.LoadReport(state=pb.WORKER_STATE_READY))
        self._clients: list[Clients] = []

    @property
    def worker(self) -> Worker:
        (worker,) = self.registry.workers()
        return worker

    def ask(self, account: str, num: int, lengths: Sequence[int]) -> Clients:
        clients = Clients(self.dispatch, account, num, lengths)
        self._clients.append(clients)
        return clients

    async def close(self) -> None:
        await asyncio.gather(*(each.leave() for each in self._clients))
        await self.clients.close()


class Clients:
    """Clients of one account at one gateway: each sends its texts again once it has their values."""

    def __init__(self, dispatch: EncodingDispatch, account: str, num: int, lengths: Sequence[int]) -> None:
        self._dispatch = dispatch
        self._account = account
        self._texts = [EncoderInput(TokenIds([1] * length).packed()) for length in lengths]
        self.num_tokens = self.num_answers = 0
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(num)]

    async def _ask(self, number: int) -> None:
        for turn in count():
            name = f"{self._account}-{number}-{turn}"
            request = EncodingRequest(name, self._account, MODEL, self._texts, time.monotonic() + 60)
            computed: list[int] = []
            await self._dispatch.encode(request, computed)
            self.num_tokens += sum(computed)
            self.num_answers += 1

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)
