"""The blocks that prefill keeps for readers, and their release.

Release depends on no other process being alive. The KV service reports each handle that ends. If the service has been
unreachable for one lease, or restarts as another incarnation, its handles have ended and the blocks are released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

from tandem.v1.kv_transfer_pb2 import OwnerEvent
from tandem_engine.messages import ReleaseHeld, ReleaseSlabs
from tandem_runtime.errors import DeadlineExceeded, TandemError, Unavailable
from tandem_runtime.kv.client import KvClient
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet, supervised
from tandem_worker.engine_link import EngineLink
from tandem_worker.kv_link import KvLink, lost_is_unavailable
from tandem_worker.requests import ActiveRequest

log = get_logger(__name__)

_RETRY_SECONDS = 1.0


class PinnedBlocks:
    """The handles whose blocks the engine keeps, by handle id."""

    def __init__(
        self, engine: EngineLink, link: KvLink, on_ended: Callable[[ActiveRequest], None] = lambda request: None
    ) -> None:
        """Calls `on_ended` for each request whose handle has ended."""
        self._engine = engine
        self._link = link
        self._on_ended = on_ended
        self._num_blocks_of: dict[bytes, Callable[[int], int]] = {}
        self._pinned: dict[bytes, tuple[str, str]] = {}  # handle id -> (engine's request id, KV service's incarnation)
        self._requests: dict[bytes, ActiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks = TaskSet()

    def add(self, request: ActiveRequest, num_blocks_of: Callable[[int], int] = lambda num_slabs: 0) -> None:
        """`num_blocks_of` returns the blocks of so many leading slabs."""
        handle = request.submit.handle
        self._num_blocks_of[handle.handle_id] = num_blocks_of
        self._pinned[handle.handle_id] = (request.key, handle.holder_incarnation)
        self._requests[handle.handle_id] = request
        self._empty.clear()

    def abort(self, request: ActiveRequest, error: TandemError) -> None:
        """Release a request's blocks now, and abort the handle at the KV service, so that its readers do not wait."""
        self._release(request.submit.handle.handle_id)
        self._tasks.spawn(self._abort(request, error))

    def follow(self, region_id: str) -> None:
        """Start following the handles of a region, to release the blocks of each handle that ends."""
        follow = supervised("kv-owner", lambda: self._follow(region_id), longest_pause_seconds=1.0)
        self._tasks.spawn(follow, name="kv-owner")

    def requests(self) -> list[ActiveRequest]:
        """Return the requests whose blocks are pinned, those that have ended here included."""
        return list(self._requests.values())

    async def wait_empty(self) -> None:
        await self._empty.wait()

    async def close(self) -> None:
        await self._tasks.cancel()

    def _release(self, handle_id: bytes) -> None:
        if (pinned := self._pinned.pop(handle_id, None)) is not None:
            self._engine.send(ReleaseHeld(pinned[0]))
            del self._requests[handle_id], self._num_blocks_of[handle_id]
        if not self._pinned:
            self._empty.set()

    def _ended(self, handle_id: bytes) -> None:
        request = self._requests.get(handle_id)
        self._release(handle_id)
        if request is not None:
            self._on_ended(request)

    def _copied(self, copied: OwnerEvent.Copied) -> None:
        """Let the engine use the slots of slabs again that all readers have copied."""
        if (pinned := self._pinned.get(copied.handle_id)) is not None:
            num_blocks = self._num_blocks_of[copied.handle_id](copied.num_slabs)
            self._engine.send(ReleaseSlabs(pinned[0], num_blocks))

    def _release_all_of(self, incarnation: str) -> None:
        lost = [handle_id for handle_id, (_, holder) in self._pinned.items() if holder == incarnation]
        for handle_id in lost:
            self._release(handle_id)
        if lost:
            log.warning("kv_service_lost", incarnation=incarnation, num_handles=len(lost))

    async def _follow(self, region_id: str) -> None:
        while True:
            client, incarnation = await self._link.wait_client()
            follow = partial(self._follow_service, client, region_id)
            following = self._tasks.spawn(supervised("kv-owner-events", follow, longest_pause_seconds=1.0))
            try:
                await self._link.wait_gone(client)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            self._release_all_of(incarnation)

    async def _follow_service(self, client: KvClient, region_id: str) -> None:
        try:
            with lost_is_unavailable():
                async with aclosing(client.own(region_id)) as owned:
                    async for event in owned:
                        if isinstance(event, OwnerEvent.Copied):
                            self._copied(event)
                        else:
                            self._ended(event.handle_id)
        except TandemError as error:
            log.warning("kv_owner_refused", error=error.message)

    async def _abort(self, request: ActiveRequest, error: TandemError) -> None:
        """Abort the handle once the KV service can be reached; otherwise its readers wait until the deadline."""
        try:
            async with asyncio.timeout(max(0.0, request.seconds_left)):
                await self._abort_until_delivered(request, error)
        except TimeoutError:
            log.info("kv_abort_failed", request_id=request.submit.handle.request_id)

    async def _abort_until_delivered(self, request: ActiveRequest, error: TandemError) -> None:
        handle = request.submit.handle
        while True:
            client, _ = await self._link.wait_client()
            try:
                with lost_is_unavailable():
                    await client.abort(handle, error, request.seconds_left)
                return
            except (Unavailable, DeadlineExceeded):  # the service is gone, or stopped for longer than a call may take
                await asyncio.sleep(_RETRY_SECONDS)
            except TandemError as refusal:
                log.info("kv_abort_refused", request_id=handle.request_id, error=refusal.message)
                return
