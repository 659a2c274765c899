"""Measures the pause that a client sees when its decode worker is lost.

A loss is detected when the control plane learns of it (`Dispatcher.call_failed`): the stream to a killed worker breaks
at once, a stopped one is forgotten after its silence. The pause is from then to the next token at the client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.request_state import ChoiceState, RequestState
from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.explain.history import Call
from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Draining, TandemError


@dataclass(eq=False)
class Pause:
    """One stream that lost its decode worker in the middle of its answer. Times are time.monotonic()."""

    request_id: str
    choice_index: int
    worker_id: str
    why: str
    num_tokens: int
    """Tokens of prompt and answer when the worker was lost."""
    num_answer_tokens: int
    last_token_at: float
    detected_at: float
    had_another: bool
    """Whether another decode worker was available all the time."""
    seconds: float | None = None
    """Seconds from detection to the next token; None if the client left before it."""
    num_cached_tokens: int | None = None
    """Cached tokens at the next worker; None if that worker was lost too."""
    calls: tuple[str, ...] = ()
    """The calls to workers since the loss, and what the last one's engine did: seconds since the loss."""

    @property
    def has_survived(self) -> bool:
        """Return whether the KV cache survived: less than an eighth, or than four blocks, had to be computed."""
        if self.num_cached_tokens is None:
            return False
        return self.num_tokens - self.num_cached_tokens <= max(64, self.num_tokens // 8)


class Pauses:
    """All pauses of a run. Runs on the control plane's event loop."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.all: list[Pause] = []
        self._registry = registry
        self._open: dict[tuple[str, int], Pause] = {}
        self._last_token_at: dict[tuple[str, int], float] = {}
        registry.listen(self._fleet_changed)

    def watching(self, dispatcher: Dispatcher) -> AbstractContextManager[Any]:
        """Hear of every loss while the context lasts."""
        recover = dispatcher.call_failed

        def call_failed(state: RequestState, call: WorkerCall, error: TandemError) -> None:
            choice = None if call.choice_index is None else state.choices[call.choice_index]
            if choice is not None and choice.tokens and not choice.is_over and not isinstance(error, Draining):
                self._lost(state, choice, call, error)
            recover(state, call, error)

        return patch.object(dispatcher, "call_failed", call_failed)

    def token_came(self, request_id: str, choice_index: int, num_answer_tokens: int) -> None:
        """Record tokens that the client received; tokens of the lost worker end no pause."""
        key, now = (request_id, choice_index), time.monotonic()
        self._last_token_at[key] = now
        pause = self._open.get(key)
        if pause is not None and pause.seconds is None and num_answer_tokens > pause.num_answer_tokens:
            pause.seconds = now - pause.detected_at

    def ended(self, stream: RequestStream) -> None:
        """An answer came to its end: its last workers have said what they found cached."""
        for choice in stream.state.choices:
            pause = self._open.pop((stream.state.request.request_id, choice.index), None)
            if pause is not None and choice.ledger is not None:
                pause.num_cached_tokens = choice.ledger.num_cached_tokens
                calls = [call for call in stream.state.history.calls if call.sent_at >= pause.detected_at]
                pause.calls = (
                    *(_story(call, pause.detected_at) for call in calls),
                    _engine_story(choice.ledger, pause.detected_at),
                )

    def _lost(self, state: RequestState, choice: ChoiceState, call: WorkerCall, error: TandemError) -> None:
        key = (state.request.request_id, choice.index)
        pause = Pause(
            *key,
            call.link.worker.worker_id,
            error.message,
            len(state.request.token_ids) + len(choice.tokens),
            len(choice.tokens),
            self._last_token_at.get(key, time.monotonic()),
            time.monotonic(),
            had_another=self._has_another(call),
        )
        self._open[key] = pause
        self.all.append(pause)

    def _has_another(self, call: WorkerCall) -> bool:
        return any(
            worker.is_usable and worker.incarnation != call.incarnation
            for worker in self._registry.workers(pb.WORKER_ROLE_DECODE)
        )

    def _fleet_changed(self, *_: object) -> None:
        """Drop workers that are lost while a stream waits: the stream could not continue there."""
        if not any(worker.is_usable for worker in self._registry.workers(pb.WORKER_ROLE_DECODE)):
            for pause in self._open.values():
                pause.had_another = pause.had_another and pause.seconds is not None


def _story(call: Call, since: float) -> str:
    """Return when a call was sent, accepted and answered. On Linux both clocks of Python are the same."""
    times = (call.sent_at, call.accepted_at, call.output_at)
    shown = (f"{seconds - since:.3f}" if seconds is not None else "-" for seconds in times)
    return f"{call.worker_id} {'/'.join(shown)} s"


def _engine_story(ledger: pb.PhaseLedger, since: float) -> str:
    """Return when the engine got the request, scheduled it and had its first token, by clocks that did not jump."""
    began = since + time.time() - time.monotonic()
    times = (ledger.submitted_ns, ledger.scheduled_ns, ledger.first_token_ns)
    return f"engine {'/'.join(f'{nanoseconds / 1e9 - began:.3f}' for nanoseconds in times)} s"


def quantiles(seconds: Sequence[float]) -> str:
    """Return p50, p99 and the maximum in milliseconds."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    return f"{len(ordered)}: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, longest {ordered[-1] * 1000:.0f} ms"
