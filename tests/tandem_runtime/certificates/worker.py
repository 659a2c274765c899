"""A worker's server for tests, whose handlers note who calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from tandem_runtime.certificates.access import caller
from tandem_runtime.certificates.membership import FleetMember
from tests.tandem_runtime.serving import serving as serving_service

SERVICE = "tandem.v1.WorkerService"


class Worker(WorkerServiceServicer):
    """Echoes Attach, never answers Tables, sends assets without end, and counts the calls that run."""

    def __init__(self) -> None:
        self.serials: list[int] = []
        self.num_running = 0
        self.ended = asyncio.Event()

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: Any, context: Any) -> pb.StatsReply:
        self.serials.append(caller().serial)
        return pb.StatsReply()

    async def Attach(self, requests: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        with self._running():
            async for command in requests:
                yield pb.Event(hello=command.hello)

    async def Tables(self, request: Any, context: Any) -> Any:
        with self._running():
            await asyncio.Event().wait()

    async def GetAsset(self, request: Any, context: Any) -> AsyncIterator[pb.Chunk]:
        with self._running():
            while True:
                yield pb.Chunk(data=bytes(1 << 20))

    def _running(self) -> Any:
        return _Running(self)


class _Running:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.num_running += 1

    def __exit__(self, *_: object) -> None:
        self._worker.num_running -= 1
        self._worker.ended.set()


def serving(worker: Worker, member: FleetMember, listen: str = "127.0.0.1:0") -> AbstractAsyncContextManager[str]:
    """Serve `worker` for a block; the block gets its address."""
    return serving_service(lambda server: add_WorkerServiceServicer_to_server(worker, server), SERVICE, member, listen)
