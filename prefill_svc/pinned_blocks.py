"""Which blocks does prefill keep for readers, and when are they given back?

Clean-up depends on nobody being alive: the KV service says when a handle ends; when the service has been gone for a
lease, or is back as another incarnation, its handles are gone too, and the blocks go back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import ReleaseHeld
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.kv.client import KvClient
from tandem_runtime.log import get_logger
from tandem_worker.engine_link import EngineLink
from tandem_worker.kv_link import KvLink, lost_is_unavailable

log = get_logger(__name__)

_RETRY_SECONDS = 1.0


class Holds:
    """The handles whose blocks the engine keeps, by handle id."""

    def __init__(self, engine: EngineLink, link: KvLink) -> None:
        self._engine = engine
        self._link = link
        self._held: dict[bytes, tuple[str, str]] = {}  # handle id -> (engine's request id, holder's incarnation)
        self._handles: dict[bytes, pb.KvHandle] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, handle: pb.KvHandle, request_id: str) -> None:
        self._held[handle.handle_id] = (request_id, handle.holder_incarnation)
        self._handles[handle.handle_id] = handle
        self._empty.clear()

    def abort(self, handle: pb.KvHandle, error: TandemError) -> None:
        """Give a request's blocks back now, and tell the KV service, so that the reader does not wait."""
        self._release(handle.handle_id)
        self._spawn(self._tell(handle, error))

    def follow(self, region_id: str) -> None:
        """Start listening for handles that have ended."""
        self._spawn(self._listen(region_id))

    def handles(self) -> list[pb.KvHandle]:
        """Return the handles whose blocks are kept."""
        return list(self._handles.values())

    async def wait_empty(self) -> None:
        await self._empty.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _release(self, handle_id: bytes) -> None:
        if (held := self._held.pop(handle_id, None)) is not None:
            self._engine.send(ReleaseHeld(held[0]))
            del self._handles[handle_id]
        if not self._held:
            self._empty.set()

    def _release_all_of(self, incarnation: str) -> None:
        lost = [handle_id for handle_id, (_, holder) in self._held.items() if holder == incarnation]
        for handle_id in lost:
            self._release(handle_id)
        if lost:
            log.warning("kv_service_lost", incarnation=incarnation, num_handles=len(lost))

    async def _listen(self, region_id: str) -> None:
        while True:
            client, incarnation = await self._link.wait_client()
            listening = asyncio.create_task(self._listen_to(client, region_id))
            await self._link.wait_gone(client)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            self._release_all_of(incarnation)

    async def _listen_to(self, client: KvClient, region_id: str) -> None:
        try:
            with lost_is_unavailable():
                async with aclosing(client.own(region_id)) as owned:
                    async for ended in owned:
                        self._release(ended.handle_id)
        except TandemError as error:
            log.warning("kv_owner_refused", error=error.message)

    async def _tell(self, handle: pb.KvHandle, error: TandemError) -> None:
        """Abort the handle, as soon as the KV service can be reached: its readers wait until the deadline else."""
        try:
            async with asyncio.timeout(max(0.0, handle.deadline_unix_ms / 1000 - time.time())):
                await self._tell_until_heard(handle, error)
        except TimeoutError:
            log.info("kv_abort_not_delivered", request_id=handle.request_id)

    async def _tell_until_heard(self, handle: pb.KvHandle, error: TandemError) -> None:
        while True:
            client, _ = await self._link.wait_client()
            try:
                with lost_is_unavailable():
                    await client.abort(handle, error)
                return
            except Unavailable:
                await asyncio.sleep(_RETRY_SECONDS)
            except TandemError as refusal:
                log.info("kv_abort_refused", request_id=handle.request_id, error=refusal.message)
                return

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
