"""Renews the leases that this process holds, and reports those that have ended."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.log import get_logger

log = get_logger(__name__)

Renew = Callable[[Sequence[pb.KvHandle], str], Awaitable[list[HandleState]]]
Lost = Callable[[pb.KvHandle, str, HandleState], None]

_ENDED = frozenset({HandleState.RELEASED, HandleState.ABORTED, HandleState.EXPIRED})
WRITER = ""
"""The reader id of a writer's renewals."""


class LeaseKeeper:
    """Renews every held lease each `interval_seconds`; drops those that have ended and calls `lost`."""

    def __init__(self, renew: Renew, lost: Lost, interval_seconds: float) -> None:
        self._renew = renew
        self._lost = lost
        self._interval_seconds = interval_seconds
        self._held: dict[tuple[bytes, str], pb.KvHandle] = {}
        self._task: asyncio.Task[None] | None = None

    def hold(self, handle: pb.KvHandle, reader_id: str) -> None:
        self._held[handle.handle_id, reader_id] = handle
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def let_go(self, handle: pb.KvHandle, reader_id: str) -> None:
        self._held.pop((handle.handle_id, reader_id), None)

    def forget(self, handle: pb.KvHandle) -> None:
        self.forget_id(handle.handle_id)

    def forget_id(self, handle_id: bytes) -> None:
        self._held = {key: handle for key, handle in self._held.items() if key[0] != handle_id}

    async def close(self) -> None:
        self._held.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            by_reader = defaultdict(list)
            for (_, reader_id), handle in self._held.items():
                by_reader[reader_id].append(handle)
            await asyncio.gather(*(self._renew_all(handles, reader_id) for reader_id, handles in by_reader.items()))

    async def _renew_all(self, handles: list[pb.KvHandle], reader_id: str) -> None:
        try:
            states = await self._renew(handles, reader_id)
        except TandemError as error:  # the service may return before the leases expire
            log.warning("kv_leases_not_renewed", num_handles=len(handles), reason=error.message)
            return
        for handle, state in zip(handles, states, strict=True):
            key = handle.handle_id, reader_id
            if key in self._held and _is_lost(handle, reader_id, state):
                del self._held[key]
                self._lost(handle, reader_id, state)


def _is_lost(handle: pb.KvHandle, reader_id: str, state: HandleState) -> bool:
    """Return whether a renewal's answer means loss: AWAITED is normal for a reader, and a loss for a writer."""
    if state is HandleState.AWAITED:
        return reader_id == WRITER or time.time() * 1000 > handle.deadline_unix_ms
    return state in _ENDED
