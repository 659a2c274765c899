"""How does the gateway itself end a handle, so that clean-up does not depend on a worker?"""

from __future__ import annotations

import asyncio

from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import KvClient
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class KvClients:
    """Clients of the KV services that hold this gateway's handles, by address.

    What cannot be delivered is only logged: the handle's lease runs out by itself.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._clients: dict[str, KvClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def release_all(self, handle: pb.KvHandle) -> None:
        """End the handle: nobody needs its blocks any more."""
        try:
            await self._client(handle).release_all(handle)
        except TandemError as error:
            log.info("kv_release_not_delivered", request_id=handle.request_id, error=error.message)

    async def release(self, handle: pb.KvHandle, reader_id: str) -> None:
        """Give back the lease of a reader that died."""
        try:
            await self._client(handle).release(handle, reader_id)
        except TandemError as error:
            log.info("kv_release_not_delivered", request_id=handle.request_id, error=error.message)

    async def abort(self, handle: pb.KvHandle, reason: TandemError) -> None:
        """End the handle and tell its readers why."""
        try:
            await self._client(handle).abort(handle, reason)
        except TandemError as error:
            log.info("kv_abort_not_delivered", request_id=handle.request_id, error=error.message)

    def changed(self, worker: Worker, is_here: bool) -> None:
        """Hang up on a KV service that is gone; a listener of the registry."""
        if (
            not is_here
            and worker.role == pb.WORKER_ROLE_KV
            and (client := self._clients.pop(worker.info.address, None))
        ):
            task = asyncio.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    def _client(self, handle: pb.KvHandle) -> KvClient:
        address = handle.holder_address
        if address not in self._clients:
            self._clients[address] = KvClient(address, self._incarnation)
        return self._clients[address]
