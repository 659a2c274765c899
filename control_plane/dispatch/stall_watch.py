"""Takes calls away from workers that do not answer, or accept and then bring no token."""

from __future__ import annotations

import asyncio
import time

from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.call_watch import CallWatch
from control_plane.fleet.worker_health import WorkerHealth
from tandem_runtime.errors import Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_LOOK_SECONDS = 0.02
_LATE_SECONDS = 0.05
_PAUSE_TIMES = 20
"""A look takes a twentieth of the time at most, however many calls wait."""
MAX_STALLS = 3
"""How often a request is taken away from a worker; after that it waits, whatever the worker does."""


class Stalled(Unavailable):
    """Raised by the gateway only: the worker did not answer in time. It has not died, as far as is known."""


class StallWatch:
    """Looks at the calls that wait for a first token, some times a second while there are any."""

    def __init__(self, health: WorkerHealth) -> None:
        self._health = health
        self._calls: dict[CallWatch, tuple[RequestState, WorkerCall]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._took = 0.0

    def add(self, state: RequestState, call: WorkerCall) -> None:
        """Watch a call until its first token."""
        if call.watch is not None:
            self._calls[call.watch] = state, call
            self._schedule()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Recover the calls that have stalled."""
        self._calls = {watch: called for watch, called in self._calls.items() if not watch.is_over}
        for watch, reason, is_certain in list(self._health.stalled()):
            if (called := self._calls.pop(watch, None)) is not None:
                self._stalled(*called, reason, is_certain=is_certain)

    def _stalled(self, state: RequestState, call: WorkerCall, reason: str, *, is_certain: bool) -> None:
        if call.watch is None or state.count_stall() > MAX_STALLS:
            return
        log.warning("call_stalled", request_id=state.request.request_id, worker=call.worker_id, reason=reason)
        call.watch.failed(reason, "slow", is_certain=is_certain)
        for each in (call, *_beside(state, call)):
            error = Stalled(f"worker {call.worker_id} was given up: {reason}", retry_after_seconds=1.0)
            is_refusal = each.answer(error)
            each.close(cancel=True)
            if is_refusal:
                continue
            if each.is_prefill:
                state.prefill_ended()
            state.call_failed(each, error)

    def _schedule(self) -> None:
        if self._timer is None:
            pause = max(_LOOK_SECONDS, _PAUSE_TIMES * self._took)
            self._timer = asyncio.get_running_loop().call_later(pause, self._tick, time.perf_counter() + pause)

    def _tick(self, due: float) -> None:
        self._timer, began = None, time.perf_counter()
        late = began - due
        try:
            if late < _LATE_SECONDS:
                self.look()
            else:  # this process stood still: the answers may be there, unread
                self._health.stood_still(late)
        except Exception:  # our own error with one call must not end the watch of all
            log.exception("unhandled_exception", task="stall_watch")
        self._took = time.perf_counter() - began
        if self._calls:
            self._schedule()


def _beside(state: RequestState, stalled: WorkerCall) -> list[WorkerCall]:
    """Return the calls of the request's other choices at that worker that wait for the same: only one is watched."""
    if stalled.is_prefill:
        return []
    calls = [choice.call for choice in state.choices if choice.call is not None and choice.call is not stalled]
    return [each for each in calls if each.is_open and not each.has_output and each.incarnation == stalled.incarnation]
