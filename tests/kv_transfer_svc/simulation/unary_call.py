"""A unary call over the simulated network."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from tandem_runtime.errors import DeadlineExceeded, InternalError, TandemError, from_proto
from tests.kv_transfer_svc.simulation.network import Network, Server, unreachable
from tests.kv_transfer_svc.simulation.virtual_loop import Process

IS_REPEATED: ContextVar[bool] = ContextVar("a message that was executed before", default=False)
"""Set while the duplicate of a successful unary call is executed."""


class UnaryCall:
    """One request and its reply; each may be lost, late or duplicated."""

    def __init__(self, network: Network, client: Process, address: str, path: str) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._path = path
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        server = network.servers.get(address)
        self._server = server if server is not None and not server.process.is_dead else None
        self._has_succeeded = False
        if self._server is not None:
            self.ends = client, self._server.process

    async def run(self, request: bytes, timeout: float) -> bytes:
        network, server = self._network, self._server
        if server is None:
            network.later(network.delay(), self.broken, "connection refused")
        else:
            network.open(self)
            self._send(server, request)
        try:
            async with asyncio.timeout(timeout):
                return await self._answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"DEADLINE_EXCEEDED: {self._path} at {self._address}") from error
        finally:
            network.close(self)

    def broken(self, why: str) -> None:
        error = unreachable(self._address, why)
        self._network.later(self._network.delay(), self._client.call, self._fail, error)

    def channel_closed(self) -> None:
        self._answer.cancel()

    def _send(self, server: Server, request: bytes) -> None:
        network, faults = self._network, self._network.faults
        if network.rng.random() < faults.duplicate:
            network.counts["requests duplicated"] += 1
            late = network.rng.uniform(0, faults.duplicate_seconds)
            network.later(late, self._arrive, server, request)
        if self._is_lost("requests lost"):
            return
        network.deliver(self._client, server.process, self._serve, server, request)

    def _arrive(self, server: Server, request: bytes) -> None:
        self._network.deliver(self._client, server.process, self._serve, server, request)

    def _serve(self, server: Server, request: bytes) -> None:
        asyncio.get_running_loop().create_task(self._execute(server, request))

    async def _execute(self, server: Server, request: bytes) -> None:
        if self._has_succeeded:
            self._network.counts["duplicates after success"] += 1
            IS_REPEATED.set(True)
        try:
            reply = await server.methods[self._path](request)
        except TandemError as error:
            answer, args = self._fail, (from_proto(error.to_proto()),)
        except Exception as error:  # noqa: BLE001 - reported as a violation
            self._network.on_violation(f"{self._path} raised {error!r}")
            answer, args = self._fail, (InternalError(repr(error)),)
        else:
            self._has_succeeded = True
            answer, args = self._succeed, (reply,)  # type: ignore[assignment]
        if not self._is_lost("replies lost"):
            self._network.deliver(server.process, self._client, answer, *args)

    def _is_lost(self, what: str) -> bool:
        network, faults = self._network, self._network.faults
        draw = network.rng.random()
        if draw >= faults.lose + faults.silence:
            return False
        network.counts[what] += 1
        if draw < faults.lose:
            self.broken("the connection was reset")
        return True

    def _succeed(self, reply: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(reply)

    def _fail(self, error: TandemError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)
