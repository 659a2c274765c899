"""Where the requests of a simulated gateway wait while no worker has room: first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from control_plane.simulator.engine import Job
from control_plane.simulator.policies.policy import Placement
from control_plane.simulator.traces import TraceRequest

_RETRY_SECONDS = 0.25
"""How often the first waiting request tries again though nothing has ended."""

Reason = Literal["late", "full", "waited"]
"""Why a request was refused: predicted to wait too long, too many waited, it has waited too long."""


@dataclass(frozen=True)
class Attempt:
    """What became of an attempt to place a request."""

    placement: Placement | None
    """None: it was not placed."""
    decode: int = 0
    refused_by: tuple[int, ...] = ()
    """Workers that were offered the request, and refused."""


class Hall(Protocol):
    """What a line asks of the simulation."""

    def place(self, request: TraceRequest, now: float) -> Attempt:
        """Place a request, and submit it."""

    def at(self, moment: float, happen: Callable[[float], object]) -> None:
        """Let something happen later."""

    def refuse(self, request: TraceRequest, reason: Reason, now: float) -> None:
        """A request will not be served."""

    def generated(self, number: int, now: float) -> float:
        """Return how many tokens of a running request's answer there are. `number`: the request's."""


class Line(Protocol):
    """The requests of one gateway that wait."""

    def arrived(self, request: TraceRequest, now: float) -> None:
        """A request has come: it is placed, it waits, or it is refused."""

    def prompt_read(self, request: TraceRequest, now: float) -> None:
        """A prompt of this gateway has left its worker's queue."""

    def ended(self, request: TraceRequest, computed: Job, now: float) -> None:
        """A request of this gateway has ended. `computed`: the job that computed its prompt."""

    def reported(self, number: int, now: float) -> None:
        """A worker has reported, and the policy knows it."""


class FirstCome:
    """Nobody is refused, and nobody goes before another."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._waiting: deque[TraceRequest] = deque()
        self._retry_at: float | None = None

    def arrived(self, request: TraceRequest, now: float) -> None:
        if self._waiting or not self._try(request, now):
            self._waiting.append(request)
            self._retry_later(now)

    def prompt_read(self, request: TraceRequest, now: float) -> None:
        """Room at decode workers is what requests wait for."""

    def ended(self, request: TraceRequest, computed: Job, now: float) -> None:
        self._hall.at(now, self._retry)

    def reported(self, number: int, now: float) -> None:
        """The next attempt is soon enough."""

    def _try(self, request: TraceRequest, now: float) -> bool:
        return self._hall.place(request, now).placement is not None

    def _retry_later(self, now: float) -> None:
        if self._retry_at is None:
            self._retry_at = now + _RETRY_SECONDS
            self._hall.at(self._retry_at, self._tick)

    def _tick(self, now: float) -> None:
        self._retry_at = None
        self._retry(now)

    def _retry(self, now: float) -> None:
        """Let waiting requests try, in order, while there is room."""
        while self._waiting and self._try(self._waiting[0], now):
            self._waiting.popleft()
        if self._waiting:
            self._retry_later(now)
