"""The grants of a stand-in worker: gateways share its seats as they share the room of a real worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

from tandem.v1 import types_pb2 as pb
from tandem_runtime.virtual_counters import AnswerMeter
from tandem_worker.grant_sender import demand_of
from tandem_worker.grant_timer import GrantTimer
from tandem_worker.grants import GrantDivider, Room

_POOL_TOKENS = 1 << 34
"""More than any load needs: only seats are short."""


class Stream(Hashable, Protocol):
    """A gateway's Attach stream."""

    def send(self, event: pb.Event) -> None: ...


class SeatGrants:
    """The grants of one worker; every method runs on the event loop."""

    def __init__(self, num_places: int, num_running: Callable[[], int]) -> None:
        """`num_places`: requests that the worker may have at once."""
        self._num_places = num_places
        self._num_running = num_running
        self._divider: GrantDivider[Stream] = GrantDivider()
        self._timer = GrantTimer(self._divider, self._room, _send)

    def attach(self, stream: Stream) -> None:
        self._divider.attach(stream)
        if self._timer.is_open:
            self._timer.look(0.0)
        else:
            self._timer.open()

    def detach(self, stream: Stream) -> None:
        self._divider.detach(stream)
        self._timer.look(0.0)

    def demanded(self, stream: Stream, demand: pb.Demand) -> None:
        if stream in self._divider:
            self._divider.seen(stream, demand.grant_number)
            if demand.HasField("waiting"):
                self._divider.demanded(stream, demand_of(demand.waiting), time.monotonic())
            self._timer.look(0.0)

    def received(self, stream: Stream, submit: pb.Submit) -> None:
        """A request has come, whatever becomes of it."""
        if stream in self._divider and submit.HasField("grant_tokens"):
            self._divider.submitted(stream, submit.grant_tokens, time.monotonic())

    def refused(self, stream: Stream) -> pb.Grant | None:
        """Return the grant to send with a refusal."""
        return self._timer.renewed(stream) if stream in self._divider else None

    def began(self, stream: Stream, submit: pb.Submit) -> AnswerMeter:
        """A request has its seat; return what charges its account for its answer."""
        self._divider.let_in(stream, submit.fairness_key, submit.work, time.monotonic(), submit.priority)
        charge = partial(self._divider.charge, submit.fairness_key, service_class=submit.priority)
        return AnswerMeter(charge, submit.work_of_answer)

    def ended(self) -> None:
        """A seat is free."""
        self._timer.changed()

    def _room(self) -> Room:
        num_running = self._num_running()
        return Room(_POOL_TOKENS, max(0, self._num_places - num_running), takes_any=not num_running)


def _send(stream: Stream, grant: pb.Grant) -> None:
    stream.send(pb.Event(grant=grant))
