"""Renews the leases that this process holds, and reports those that have ended."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.time_left import seconds_left_by_wall_clock
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

Renew = Callable[[Sequence[pb.KvHandle], str], Awaitable[Sequence[HandleState | None]]]
"""Returns one state per handle; None for a state that this version does not know."""
Lost = Callable[[pb.KvHandle, str, HandleState], None]

_ENDED = frozenset({HandleState.RELEASED, HandleState.ABORTED, HandleState.EXPIRED})
WRITER = ""
"""The reader id of a writer's renewals."""


@dataclass(frozen=True)
class _Held:
    handle: pb.KvHandle
    until: float
    """The handle's deadline, by `time.monotonic`."""


class LeaseKeeper:
    """Renews every held lease each `interval_seconds`; drops those that have ended and calls `lost`."""

    def __init__(self, renew: Renew, lost: Lost, interval_seconds: float) -> None:
        self._renew = renew
        self._lost = lost
        self._interval_seconds = interval_seconds
        self._held: dict[tuple[bytes, str], _Held] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_logged_unknown = False

    def hold(self, handle: pb.KvHandle, reader_id: str, seconds_left: float | None = None) -> None:
        """Start to renew. `seconds_left`: until the handle's deadline; None: by the wall clocks."""
        if seconds_left is None:
            seconds_left = seconds_left_by_wall_clock(handle)
        self._held[handle.handle_id, reader_id] = _Held(handle, time.monotonic() + seconds_left)
        if self._task is None:
            # Restarted within an interval: a lease lasts for a few of them.
            loop = supervised("lease-renewals", self._run, longest_pause_seconds=self._interval_seconds)
            self._task = asyncio.get_running_loop().create_task(loop, name="lease-renewals")

    def seconds_left(self, handle: pb.KvHandle, reader_id: str) -> float:
        """Return the time until a handle's deadline, as told to `hold`; by the wall clocks if the lease is not held."""
        held = self._held.get((handle.handle_id, reader_id))
        return seconds_left_by_wall_clock(handle) if held is None else held.until - time.monotonic()

    def let_go(self, handle: pb.KvHandle, reader_id: str) -> None:
        self._held.pop((handle.handle_id, reader_id), None)

    def forget(self, handle: pb.KvHandle) -> None:
        self.forget_id(handle.handle_id)

    def forget_id(self, handle_id: bytes) -> None:
        self._held = {key: held for key, held in self._held.items() if key[0] != handle_id}

    async def close(self) -> None:
        self._held.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            by_reader = defaultdict(list)
            for (_, reader_id), held in self._held.items():
                by_reader[reader_id].append(held.handle)
            await asyncio.gather(*(self._renew_all(handles, reader_id) for reader_id, handles in by_reader.items()))

    def _note_unknown(self, states: Sequence[HandleState | None]) -> None:
        """Log once that a newer KV service reports states which this version cannot read; such leases are kept."""
        num_unknown = sum(state is None for state in states)
        if num_unknown and not self._has_logged_unknown:
            self._has_logged_unknown = True
            log.warning("kv_lease_state_unknown", num_handles=num_unknown, remedy="update this worker")

    async def _renew_all(self, handles: list[pb.KvHandle], reader_id: str) -> None:
        """Renew the leases of one reader. A failure ends neither the others' renewals nor the next."""
        try:
            states = await self._renew(handles, reader_id)
        except TandemError as error:  # the service may return before the leases expire
            log.warning("kv_leases_not_renewed", num_handles=len(handles), reason=error.message)
            return
        except Exception:
            log.exception("kv_leases_not_renewed", num_handles=len(handles))
            return
        if len(states) != len(handles):
            reason = f"the KV service answered with {len(states)} states"
            log.warning("kv_leases_not_renewed", num_handles=len(handles), reason=reason)
            return
        self._note_unknown(states)
        for handle, state in zip(handles, states, strict=True):
            key = handle.handle_id, reader_id
            held = self._held.get(key)
            if held is not None and state is not None and _is_lost(held, reader_id, state):
                del self._held[key]
                self._lost(handle, reader_id, state)


def _is_lost(held: _Held, reader_id: str, state: HandleState) -> bool:
    """Return whether a renewal's answer means loss: AWAITED is normal for a reader, and a loss for a writer."""
    if state is HandleState.AWAITED:
        return reader_id == WRITER or time.monotonic() > held.until
    return state in _ENDED
