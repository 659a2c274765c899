"""Stand-in workers that are sick in one of the known ways, until they are told to be well."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gateway.stand_in_worker import GatewayStream, StandIn
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.demo import checkpoint_path
from tandem_runtime.errors import DeadlineExceeded, InvalidRequest
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer
from tests.ports import free_ports

Sickness = Literal["", "unreachable", "clock_ahead", "refuses_all", "never_answers", "ten_times_slow"]

FIRST_TOKEN_SECONDS = 0.02
"""From Submit to the first token of a worker that is well."""
_SLOW_TIMES = 10


@dataclass(frozen=True)
class Submitted:
    """A request that a worker got."""

    request_id: str
    is_trial: bool


class _Stream(GatewayStream):
    """Answers as a worker's sickness allows. Implements what `GatewayStream` does on one Attach stream."""

    def __init__(self, worker: SickWorker, words: Any) -> None:
        super().__init__(words, 0.0)
        self._worker = worker

    def submit(self, submit: pb.Submit, num_shared_tokens: int = 0) -> None:
        worker = self._worker
        worker.submitted.append(Submitted(submit.request_id, "-trial-" in submit.request_id))
        match worker.sickness:
            case "clock_ahead":
                self.refuse(submit, DeadlineExceeded("the request's deadline has passed"))
            case "refuses_all":
                self.refuse(submit, InvalidRequest("unknown field: new_in_the_next_release"))
            case "never_answers":
                self.accept(submit)
            case sickness:
                self.accept(submit)
                times = _SLOW_TIMES if sickness == "ten_times_slow" else 1
                asyncio.get_running_loop().call_later(
                    times * FIRST_TOKEN_SECONDS, self.answer, submit, num_shared_tokens
                )


class SickWorker(StandIn):
    """One stand-in worker of this process: registered, with a server of its own unless it is unreachable."""

    def __init__(self, worker_id: str, sickness: Sickness = "") -> None:
        super().__init__(0.0, checkpoint_path(), worker_id=worker_id)
        self.sickness: Sickness = sickness
        self.submitted: list[Submitted] = []
        (port,) = free_ports(1)
        self.info.address = f"127.0.0.1:{port}"
        self._server: GrpcServer | None = None
        self._registrar: Registrar | None = None

    def new_stream(self) -> GatewayStream:
        return _Stream(self, self._words)

    async def start(self, control: list[str]) -> None:
        """Register with gateways at `control`."""
        if self.sickness != "unreachable":
            await self._listen()
        self._registrar = Registrar(control, self.info, self.load)
        self._registrar.start()

    async def be_well(self) -> None:
        """Answer every later request as the other workers do."""
        if self.sickness == "unreachable":
            await self._listen()
        self.sickness = ""

    async def stop(self) -> None:
        if self._registrar is not None:
            await self._registrar.stop()
        if self._server is not None:
            await self._server.stop(0)

    async def _listen(self) -> None:
        def register(server: Any) -> None:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

        self._server = GrpcServer(self.info.address, register, ["tandem.v1.WorkerService"])
        await self._server.start()
        self._server.set_serving(True)


@contextlib.asynccontextmanager
async def running(control: list[str], *workers: SickWorker) -> Any:
    """Start workers, and stop them at the end."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await worker.start(control)
            stack.push_async_callback(worker.stop)
        yield
