"""The front of one worker over a scripted engine, and gateways that share it, over real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.server import GrpcServer
from tandem_worker.grant_sender import GrantSender
from tandem_worker.model_card import AssetStore
from tandem_worker.service import WorkerService
from tests.control_plane.harness import Harness, new_request, tokens_of
from tests.control_plane.scripted_worker import kv_load, kv_service
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import ready
from tests.tandem_worker.test_front import Harness as WorkerHarness


class SharedWorker(WorkerHarness):
    """A worker that grants room; a subclass is its engine."""

    def __init__(self, grants: GrantSender, **info: Any) -> None:
        """`info`: fields of the worker's registration."""
        super().__init__(grants=grants)
        self.address = ""
        self._info = info

    @property
    def card(self) -> pb.ModelCard:
        assert self.front.card is not None, "loaded"
        return self.front.card

    @property
    def info(self) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            incarnation="worker-1", address=self.address, host_id="host-a", card=self.card, **self._info
        )

    async def load_pool(self, num_blocks: int) -> None:
        self.engine.emit(msgspec.structs.replace(ready(), num_blocks=num_blocks))
        await asyncio.wait_for(self.is_ready.wait(), 10)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Serve the front at `address`; close it at the end."""
        service = WorkerService(self.front, AssetStore(), pb.WorkerInfo)
        server = GrpcServer(
            "127.0.0.1:0", lambda grpc: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc), []
        )
        self.address = await server.start()
        try:
            yield
        finally:
            await server.stop(0)
            await self.front.close()
            await asyncio.wait_for(self.pump, 10)


class AskingGateway(Harness):
    """A gateway with clients of accounts, each of which asks again once it has its answer."""

    def __init__(self, worker: SharedWorker) -> None:
        super().__init__(queue_seconds=60.0, local_prefill="never", budget=None, accept_seconds=30.0, max_waiting=200)
        self._worker = worker
        self.registry.register(kv_service(), kv_load())
        self.registry.register(worker.info, pb.LoadReport(state=pb.WORKER_STATE_READY))
        self.clients: list[asyncio.Task[None]] = []

    def card(self, name: str) -> pb.ModelCard:
        return self._worker.card

    def begin(self, account: str, num_clients: int, max_tokens: int, **fields: Any) -> None:
        """Let clients ask for answers of `max_tokens`; `fields` are those of their requests."""
        fields |= {"account": account, "model_id": "m"}
        for client in range(num_clients):
            self.clients.append(asyncio.create_task(self._ask(f"{account}{client}", max_tokens, fields)))

    async def _ask(self, client: str, max_tokens: int, fields: dict[str, Any]) -> None:
        for turn in range(10_000):
            request = new_request(max_tokens, request_id=f"{client}-{turn}", **fields)
            await tokens_of(await self.dispatcher.submit(request))

    def has_grant(self) -> bool:
        """Whether a first grant has come: until then a gateway sends some requests unasked, which may be refused."""
        attachment = self.links.attachment("worker-1")
        return attachment is not None and attachment.left() is not None

    async def kill(self) -> None:
        for client in self.clients:
            client.cancel()
        await self.links.close()
        await asyncio.gather(*self.clients, return_exceptions=True)
        await self.dispatcher.close()


@asynccontextmanager
async def granted(gateways: Sequence[AskingGateway]) -> AsyncIterator[None]:
    """Wait until each gateway has a grant; kill them at the end."""
    try:
        await until(lambda: all(gateway.has_grant() for gateway in gateways))
        yield
    finally:
        for gateway in gateways:
            await gateway.kill()
