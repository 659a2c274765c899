"""Gateways that keep to their grants never send an encode worker more than its window, whatever the order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.admission.attachment import Attachment, Grant
from encode_svc.call_counts import Amount
from encode_svc.grants import EncodeGrants, GrantsStream
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled

TOKENS, CALLS, LONGEST = 1000, 8, 0.2
NUM_GATEWAYS = 2
KEYS = st.integers(0, NUM_GATEWAYS - 1)
SIZES = st.sampled_from([20, 100, 130, 400])


@dataclass(eq=False)
class Call:
    sent_at: float
    request: pb.EncodeRequest
    num_tokens: int
    has_ended: bool = False


@dataclass(eq=False)
class Gateway:
    """One gateway, what is on its way from it and to it, and what it has at the worker."""

    stream: GrantsStream = field(default_factory=GrantsStream)
    attachment: Attachment = field(default_factory=Attachment)
    calls: list[Call] = field(default_factory=list)
    up: deque[tuple[float, pb.GrantsCommand]] = field(default_factory=deque)
    down: deque[tuple[float, Grant]] = field(default_factory=deque)
    here: list[int] = field(default_factory=list)
    num_ended: int = 0
    """Calls that are on their way although they have ended."""

    def may_send(self, now: float) -> Amount:
        """Return what it may send by the grants that it has or is about to get."""
        own = [self.attachment.grant] if self.attachment.grant is not None and self.attachment.is_live(now) else []
        grants = [*own, *(grant for _, grant in self.down)]
        sent = self.attachment
        return Amount(
            max([0, *(each.num_requests - sent.num_requests for each in grants)]),
            max([0, *(each.num_tokens - sent.num_tokens for each in grants)]),
        )

    def command(self, now: float, **fields: object) -> None:
        sent = self.attachment
        command = pb.GrantsCommand(num_calls=sent.num_requests, num_tokens=sent.num_tokens, **fields)  # type: ignore[arg-type]
        self.up.append((now, command))


class OneWorker(RuleBasedStateMachine):
    """A worker and its gateways. Calls come in any order, or end before; the messages of a stream come in theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.grants = EncodeGrants(CALLS, self.here, lambda: self.now)
        self.grants.open(TOKENS)
        self.grants.close()  # without a loop: `divide` below takes the timer's part
        self.gateways = {key: self.attached() for key in range(NUM_GATEWAYS)}
        self.divide()

    def attached(self) -> Gateway:
        gateway = Gateway()
        self.grants.attach(gateway.stream)
        return gateway

    def here(self) -> Amount:
        calls = [num for gateway in self.gateways.values() for num in gateway.here]
        return Amount(len(calls), sum(calls))

    def divide(self) -> None:
        by_stream = {gateway.stream: gateway for gateway in self.gateways.values()}
        for stream, grant in self.grants._divider.divide(self.grants._room(), self.now).items():
            taken = Grant(grant.number, grant.num_tokens, grant.num_requests, grant.valid_seconds)
            by_stream[stream].down.append((self.now, taken))

    def come(self, gateway: Gateway, index: int) -> None:
        call = gateway.calls.pop(index)
        gateway.num_ended -= call.has_ended
        try:
            self.grants.came(call.request, call.num_tokens)
        except Cancelled:
            return
        gateway.here.append(call.num_tokens)
        assert self.here().num_calls <= CALLS and self.here().num_tokens <= TOKENS

    def deliver_up(self, gateway: Gateway) -> None:
        self.grants.commanded(gateway.stream, gateway.up.popleft()[1])

    def deliver_down(self, gateway: Gateway) -> None:
        _, grant = gateway.down.popleft()
        if gateway.attachment.granted(grant, self.now):
            gateway.command(self.now, demand=pb.Demand(grant_number=grant.number))

    @rule(key=KEYS)
    def leave(self, key: int) -> None:
        """The process is killed: its calls end with it. Another one comes."""
        self.grants.detach(self.gateways[key].stream)
        self.gateways[key] = self.attached()
        self.divide()

    @rule(key=KEYS, sizes=st.lists(SIZES, min_size=1, max_size=8))
    def send(self, key: int, sizes: list[int]) -> None:
        gateway = self.gateways[key]
        sent, stream = gateway.attachment, gateway.stream.number
        for size in sizes:
            if sent.has_room(size, 1, self.now):
                sent.sent(size, self.now)
                counted = pb.CountedCall(stream=stream, number=sent.num_requests, sum_tokens=sent.num_tokens)
                gateway.calls.append(Call(self.now, pb.EncodeRequest(counted=counted), size))

    @rule(key=KEYS, data=st.data(), may_come=st.booleans())
    def end_before_it_came(self, key: int, data: st.DataObject, may_come: bool) -> None:
        """A client leaves; the call may still be on its way, or is lost."""
        gateway = self.gateways[key]
        if gateway.calls:
            index = data.draw(st.integers(0, len(gateway.calls) - 1))
            call = gateway.calls[index]
            if not may_come:
                del gateway.calls[index]
            elif not call.has_ended:
                call.has_ended = True
                gateway.num_ended += 1
            ended = pb.EndedCall(number=call.request.counted.number, num_tokens=call.num_tokens)
            gateway.command(self.now, ended=[ended])

    @rule(key=KEYS, num=st.sampled_from([0, 1, 8]), size=SIZES)
    def demand(self, key: int, num: int, size: int) -> None:
        gateway = self.gateways[key]
        waiting = pb.WaitingRequests(num_tokens=num * size, num_requests=num, first_tokens=size if num else 0)
        grant = gateway.attachment.grant
        gateway.command(self.now, demand=pb.Demand(grant_number=grant.number if grant else 0, waiting=waiting))
        self.receive_up(key)

    @rule(key=KEYS, data=st.data(), num=st.integers(1, 8))
    def receive_calls(self, key: int, data: st.DataObject, num: int) -> None:
        calls = self.gateways[key].calls
        for _ in range(min(num, len(calls))):
            self.come(self.gateways[key], data.draw(st.integers(0, len(calls) - 1)))
        self.divide()

    @rule(key=KEYS)
    def receive_up(self, key: int) -> None:
        while self.gateways[key].up:
            self.deliver_up(self.gateways[key])
        self.divide()

    @rule(key=KEYS)
    def receive_down(self, key: int) -> None:
        if self.gateways[key].down:
            self.deliver_down(self.gateways[key])

    @rule(key=KEYS, num=st.integers(1, 8))
    def answer(self, key: int, num: int) -> None:
        del self.gateways[key].here[:num]
        self.divide()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.2]), times=st.integers(1, 12))
    def wait(self, seconds: float, times: int) -> None:
        """No message is on its way for longer than 0.2 s."""
        for _ in range(times):
            self.now += seconds
            for gateway in self.gateways.values():
                while gateway.down and self.now - gateway.down[0][0] >= LONGEST:
                    self.deliver_down(gateway)
                while gateway.up and self.now - gateway.up[0][0] >= LONGEST:
                    self.deliver_up(gateway)
                while gateway.calls and self.now - gateway.calls[0].sent_at >= LONGEST:
                    self.come(gateway, 0)
            self.divide()

    @invariant()
    def what_may_come_is_on_its_way_or_is_here_fits(self) -> None:
        """As it is, not only as the worker knows it."""
        amounts = [self.here(), *(gateway.may_send(self.now) for gateway in self.gateways.values())]
        amounts += [Amount(1, call.num_tokens) for each in self.gateways.values() for call in each.calls]
        num_ended = sum(each.num_ended for each in self.gateways.values())
        assert sum(each.num_calls for each in amounts) <= CALLS + num_ended
        if not num_ended:
            assert sum(each.num_tokens for each in amounts) <= TOKENS

    @invariant()
    def nothing_stays_on_its_way(self) -> None:
        for gateway in self.gateways.values():
            if not gateway.calls and not gateway.up:
                assert gateway.stream.counts.on_way == Amount(0, 0)


OneWorker.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestOneWorker = OneWorker.TestCase
