"""Sends grants to the gateways attached to a worker, when its room or their demand has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import AttachmentRow
from tandem_engine.messages import EngineStats, Mode
from tandem_runtime.errors import TandemError
from tandem_runtime.virtual_counters import AnswerMeter
from tandem_worker.account_order import AccountDemand
from tandem_worker.grant_timer import GrantTimer
from tandem_worker.grants import Demand, GrantDivider, Room
from tandem_worker.requests import ActiveRequest, GatewayStream
from tandem_worker.worker_room import FULL_SECONDS, WorkerRoom


class GrantSender:
    """The grants of one worker; every method runs on the event loop."""

    def __init__(self, room: WorkerRoom | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`room`: the worker's; None: gateways are granted nothing, and estimate it."""
        self.is_used = room is not None
        self._room = room
        self._clock = clock
        self._divider: GrantDivider[GatewayStream] = GrantDivider()
        self._timer = GrantTimer(self._divider, self._room_now, _send, clock)
        self._meters: dict[ActiveRequest, AnswerMeter] = {}
        """Of the requests that the engine has."""

    # ------------------------------------------------------------------------------------------------- gateways

    def attach(self, stream: GatewayStream) -> None:
        """A gateway that uses grants has said hello."""
        if self.is_used:
            self._divider.attach(stream)
            self._timer.look(0.0)

    def detach(self, stream: GatewayStream) -> None:
        self._divider.detach(stream)
        self._timer.look(0.0)

    def demanded(self, stream: GatewayStream, demand: pb.Demand) -> None:
        """A gateway reports what waits there, or the grant that it has got."""
        if stream in self._divider:
            self._divider.seen(stream, demand.grant_number)
            if demand.HasField("waiting"):
                self._divider.demanded(stream, demand_of(demand.waiting), self._clock())
            self._timer.look(0.0)

    def received(self, stream: GatewayStream, submit: pb.Submit) -> None:
        """A request has come, whatever becomes of it."""
        if stream in self._divider and submit.HasField("grant_tokens"):
            self._divider.submitted(stream, submit.grant_tokens, self._clock())

    def refused(self, request: ActiveRequest, error: TandemError) -> pb.Grant | None:
        """Return the grant to send with a refusal of the engine, after the request has ended.

        What the engine keeps for others is not in its stats, so no request as large has room until something changes.
        """
        if self._room is not None:
            self._room.refused(request, error, self._clock())
            submit = request.submit
            self._divider.charge(submit.fairness_key, submit.work_of_answer - submit.work, submit.priority)
        stream = request.stream
        if stream not in self._divider:
            return None
        grant = self._timer.renewed(stream)
        self._timer.look(FULL_SECONDS)
        return grant

    def row(self, stream: GatewayStream) -> AttachmentRow:
        """Return what was granted on a stream, for tables."""
        if stream not in self._divider:
            return AttachmentRow(gateway_id=stream.gateway_id)
        submitted, granted = self._divider.of(stream, self._clock())
        return AttachmentRow(
            gateway_id=stream.gateway_id,
            num_tokens_submitted=submitted[0],
            num_requests_submitted=submitted[1],
            num_tokens_granted=granted[0],
            num_requests_granted=granted[1],
        )

    # ------------------------------------------------------------------------------------------------- requests

    def began(self, request: ActiveRequest) -> None:
        """The engine is about to get a request."""
        if self._room is not None:
            self._room.began(request)
            self._charge(request)

    def _charge(self, request: ActiveRequest) -> None:
        submit = request.submit
        self._divider.let_in(request.stream, submit.fairness_key, submit.work, self._clock(), submit.priority)
        charge = partial(self._divider.charge, submit.fairness_key, service_class=submit.priority)
        self._meters[request] = AnswerMeter(charge, submit.work_of_answer)

    def reserved(self, request: ActiveRequest, mode: Mode) -> None:
        """The engine has accepted a request."""
        if self._room is not None:
            self._room.reserved(request, mode)

    def answered(self, request: ActiveRequest, num_tokens: int) -> None:
        """A step has computed tokens of a request's answer."""
        if self._room is not None:
            self._room.answered(request)
            self._meters[request].answered(num_tokens)

    def ended(self, request: ActiveRequest) -> None:
        if self._room is not None:
            self._room.ended(request)
            self._meters.pop(request).ended()
            self._timer.changed()

    def stepped(self, stats: EngineStats, admitted: Iterable[str]) -> None:
        """A step has ended, with these stats. Requests that were `admitted` have left the engine's queue."""
        if self._room is not None:
            self._room.stepped(stats, admitted)
            self._timer.changed()

    # ---------------------------------------------------------------------------------------------------- state

    def opened(self, stats: EngineStats, block_size: int) -> None:
        """The worker is ready."""
        if self._room is not None:
            self._room.opened(stats, block_size)
            self._timer.open()

    def close(self) -> None:
        """Grant nothing more: the worker drains, or ends."""
        self._timer.close()

    def _room_now(self) -> Room:
        if self._room is None or not self._timer.is_open:
            return Room(0, 0)
        return self._room.room(self._clock())


def _send(stream: GatewayStream, grant: pb.Grant) -> None:
    stream.send(pb.Event(grant=grant))


def demand_of(message: pb.WaitingRequests) -> Demand:
    accounts = tuple(
        AccountDemand(
            each.fairness_key,
            each.service_class,
            max(1, each.num_requests),
            each.work,
            each.waited_ms / 1000,
        )
        for each in message.accounts
    )
    return Demand(
        message.num_tokens,
        message.num_requests,
        message.first_tokens,
        message.first_requests or 1,
        accounts,
        message.num_workers,
    )
