"""Checks that the real state machine of a handle takes only legal edges and keeps no lease for too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import TandemError
from tandem_runtime.kv_handle import HandleMachine, HandleState
from tests.kv_transfer_svc.simulation.truth import Truth
from tests.kv_transfer_svc.simulation.unary_call import IS_REPEATED

_A, _R, _F, _S, _L = (
    HandleState.AWAITED,
    HandleState.RESERVED,
    HandleState.FILLING,
    HandleState.SEALED,
    HandleState.LEASED,
)
_LIVE = (_A, _R, _F, _S, _L)
_RELEASED, _ABORTED, _EXPIRED = HandleState.RELEASED, HandleState.ABORTED, HandleState.EXPIRED

LEGAL: dict[str, set[tuple[HandleState, HandleState]]] = {
    "reserve": {(_A, _R)},
    "seal": {(_R, _F), (_F, _F), (_R, _S), (_F, _S), (_R, _L), (_F, _L)},
    "lease": {(state, state) for state in _LIVE} | {(_S, _L)},
    "renew_writer": {(state, state) for state in HandleState},
    "release": {(state, state) for state in _LIVE} | {(_L, _S)} | {(state, _RELEASED) for state in _LIVE},
    "release_all": {(state, _RELEASED) for state in _LIVE},
    "abort": {(state, _ABORTED) for state in _LIVE},
    "expire": {(state, state) for state in _LIVE} | {(_L, _S)} | {(state, _EXPIRED) for state in _LIVE},
}
"""Every change of state that tandem_runtime.kv_handle allows; no change is always allowed."""

WANTED = [
    *[("reserve", change) for change in LEGAL["reserve"]],
    *[("seal", change) for change in LEGAL["seal"]],
    *[("release", (state, _RELEASED)) for state in (_A, _R, _F, _L)],
    *[("release_all", (state, _RELEASED)) for state in (_A, _R, _F, _S, _L)],
    *[("abort", (state, _ABORTED)) for state in (_A, _R, _F, _S, _L)],
    *[("expire", (state, _EXPIRED)) for state in (_A, _R, _F, _S)],
    ("lease", (_S, _L)),
    ("release", (_L, _S)),
    ("expire", (_L, _S)),
]
"""Edges that a long run must take."""


class WatchedMachine(HandleMachine):
    """The real machine with checks: compares every edge with the table, and keeps the leases a second time."""

    truth: Truth

    def __init__(self, name: str, num_readers: int, deadline: float, *, reader_bound: bool = False) -> None:
        super().__init__(name, num_readers, deadline, reader_bound=reader_bound)
        self._readers_rights: dict[str, float] = {}
        self._readers_done: set[str] = set()
        self._writers_right = deadline
        self._writers_seconds = 0.0

    @property
    def rightful_until(self) -> float:
        """When the last right to keep the handle ends, by the leases that were granted."""
        rights = list(self._readers_rights.values())
        if not (self._reader_bound and rights):
            rights = [self._writers_right, *(rights if self.closed is not None else ())]
        return min([self.deadline, max(rights)])

    def has_right(self, reader_id: str, now: float) -> bool:
        return self._readers_rights.get(reader_id, 0.0) > now

    def reserve(self, now: float, writer: str, lease_seconds: float, *, is_windowed: bool = False) -> bool:
        reserve = partial(super().reserve, is_windowed=is_windowed)
        is_new = bool(self._step("reserve", reserve, now, writer, lease_seconds))
        if is_new:
            self._writers_right, self._writers_seconds = now + lease_seconds, lease_seconds
        return is_new

    def seal(self, now: float, slabs: Sequence[kv.Slab], closed: kv.Closed | None = None) -> bool:
        was_open = self.closed is None
        is_new = bool(self._step("seal", super().seal, now, slabs, closed))
        if was_open:
            self._writers_right = now + self._writers_seconds
        return is_new

    def renew_writer(self, now: float) -> None:
        self._step("renew_writer", super().renew_writer, now)
        if self.state in (_R, _F):
            self._writers_right = now + self._writers_seconds

    def lease(self, now: float, reader_id: str, seconds: float) -> None:
        self._step("lease", super().lease, now, reader_id, seconds)
        self._readers_rights[reader_id] = now + seconds
        if reader_id in self._readers_done:
            self.truth.violated(f"{self.name} was lent to {reader_id} again, which had released it")

    def release(self, reader_id: str) -> bool:
        result = bool(self._step("release", super().release, reader_id))
        self._readers_rights.pop(reader_id, None)
        self._readers_done.add(reader_id)
        if len(self._readers_done) >= self.num_readers and not self.ended:
            self.truth.violated(f"{self.name} was released by all of its {self.num_readers} readers and has not ended")
        return result

    def release_all(self) -> bool:
        return bool(self._step("release_all", super().release_all))

    def abort(self, reason: TandemError) -> bool:
        return bool(self._step("abort", super().abort, reason))

    def expire(self, now: float) -> bool:
        return bool(self._step("expire", super().expire, now))

    def _step(self, edge: str, take: Callable[..., Any], *args: Any) -> Any:
        before, state = self._fixed(), self.state
        try:
            result = take(*args)
        except TandemError as error:
            self.truth.refusals[edge, type(error).__name__] += 1
            if self._fixed() != before:
                self.truth.violated(f"{edge} of {self.name} was refused and changed it: {error.message}")
            raise
        self._check(edge, state, before)
        return result

    def _check(self, edge: str, state: HandleState, before: tuple[Any, ...]) -> None:
        truth, is_changed = self.truth, self._fixed() != before
        truth.edges[edge, state, self.state] += 1
        if edge != "expire" or is_changed:
            truth.note(f"{edge} {self.name}: {state.name} -> {self.state.name}")
        if (is_changed or state is not self.state) and (state, self.state) not in LEGAL[edge]:
            truth.violated(f"{edge} took {self.name} from {state.name} to {self.state.name}")
        # A copy does not remember its readers: a reader whose Release overtook its Watch is new to the copy.
        if is_changed and IS_REPEATED.get() and not self._reader_bound:
            truth.violated(f"a duplicate {edge} changed {self.name}, which was {state.name}")

    def _fixed(self) -> tuple[Any, ...]:
        """Everything except the times of the leases."""
        phase = HandleState.SEALED if self.state is HandleState.LEASED else self.state
        is_closed = self.closed is not None
        return phase, len(self.slabs), is_closed, self._writer, frozenset(self._released), self.end_error
