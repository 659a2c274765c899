"""Ends KV handles from the gateway, so that clean-up does not depend on a worker."""

from __future__ import annotations

import asyncio

from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import KvClient, expected_service
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)


class KvClients:
    """Clients of the KV services that hold this gateway's handles, by address and id.

    A message that cannot be delivered is only logged: the handle's lease expires by itself. `seconds_left` is the
    time until the deadline of the handle's request.
    """

    def __init__(self, incarnation: str, member: FleetMember | None = None) -> None:
        self._incarnation = incarnation
        self._member = member
        self._clients: dict[tuple[str, str], KvClient] = {}
        self._closing = TaskSet()

    async def release_all(self, handle: pb.KvHandle, seconds_left: float) -> None:
        """End the handle: no reader needs its blocks any more."""
        try:
            await self._client(handle).release_all(handle, seconds_left)
        except TandemError as error:
            log.info("kv_release_failed", request_id=handle.request_id, error=error.message)

    async def release(self, handle: pb.KvHandle, reader_id: str, seconds_left: float) -> None:
        """Give back the lease of a reader that died."""
        try:
            await self._client(handle).release(handle, reader_id, seconds_left)
        except TandemError as error:
            log.info("kv_release_failed", request_id=handle.request_id, error=error.message)

    async def abort(self, handle: pb.KvHandle, reason: TandemError, seconds_left: float) -> None:
        """End the handle and give its readers the reason."""
        try:
            await self._client(handle).abort(handle, reason, seconds_left)
        except TandemError as error:
            log.info("kv_abort_failed", request_id=handle.request_id, error=error.message)

    def changed(self, worker: Worker, is_here: bool) -> None:
        """Close the client of a KV service that is gone; a listener of the registry."""
        if is_here or worker.role != pb.WORKER_ROLE_KV:
            return
        if client := self._clients.pop((worker.info.address, worker.worker_id), None):
            self._closing.spawn(client.close())

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients), self._closing.join())

    def _client(self, handle: pb.KvHandle) -> KvClient:
        address, id = key = handle.holder_address, handle.holder_id
        expect = expected_service(self._member, id, address)
        if key not in self._clients:
            self._clients[key] = KvClient(address, self._incarnation, member=self._member, expect=expect)
        return self._clients[key]
