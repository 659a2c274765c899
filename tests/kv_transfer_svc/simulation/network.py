"""The network between the simulated processes, and its faults.

    unary calls   each message on its own: delayed, so that messages overtake each other; request or reply lost, which
                  the caller sees as a broken connection or not at all; delivered twice, the second time late
    streams       in order, as in TCP; delayed, held up, broken in the middle
    hosts apart   every message between the two hosts waits; streams break after the keepalive time

A killed process resets its connections. A stopped process keeps them until the keepalive gives up.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem_runtime.errors import TandemError, Unavailable
from tests.kv_transfer_svc.simulation.virtual_loop import Process, VirtualLoop

KEEPALIVE_SECONDS = 15.0
_HELD_UP_SECONDS = 0.3


@dataclass
class Faults:
    """The current faults; probabilities are per message of a unary call."""

    lose: float = 0.0
    silence: float = 0.0
    """Lost without an error."""
    duplicate: float = 0.0
    slowest_seconds: float = 0.002
    duplicate_seconds: float = 8.0


class Connection(Protocol):
    """A call or a socket between two processes, which a broken connection ends."""

    ends: tuple[Process, Process]

    def broken(self, why: str) -> None: ...


@dataclass
class Server:
    """A listener at an address: its process and its methods."""

    process: Process
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Network:
    """The only owner of messages in transit."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, counts: Counter[str]) -> None:
        self.loop = loop
        self.rng = rng
        self.counts = counts
        self.faults = Faults()
        self.servers: dict[str, Server] = {}
        self.on_violation: Callable[[str], None] = lambda what: None
        self._wire = Context()
        self._apart: set[frozenset[int]] = set()
        self._connections: dict[Connection, None] = {}

    # ------------------------------------------------------------------------------------------- connections

    def separate(self, one: int, other: int) -> None:
        """Hold back every message between two hosts until `heal`."""
        pair = frozenset((one, other))
        self._apart.add(pair)
        self.later(KEEPALIVE_SECONDS, self._give_up, pair)

    def heal(self) -> None:
        self._apart.clear()
        self.faults = Faults()

    def later(self, seconds: float, function: Callable[..., Any], *args: Any) -> None:
        """Schedule an event of the network, which happens even if the causing process dies."""
        self.loop.call_later(seconds, function, *args, context=self._wire)

    def are_apart(self, one: Process, other: Process) -> bool:
        return frozenset((one.host, other.host)) in self._apart

    def open(self, connection: Connection) -> None:
        self._connections[connection] = None

    def close(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def break_one(self) -> None:
        """Break every connection between two randomly chosen processes."""
        pairs = list(dict.fromkeys(connection.ends for connection in self._connections))
        if pairs:
            ends = self.rng.choice(pairs)
            self._break(lambda connection: connection.ends == ends, "the connection was reset")

    def killed(self, process: Process) -> None:
        self._break(lambda connection: process in connection.ends, f"{process.name} was killed")

    def stopped(self, process: Process) -> None:
        """Break the connections after the keepalive time: the kernel of a stopped process still acknowledges."""

        def give_up() -> None:
            if process.is_stopped and not process.is_dead:
                self._break(lambda connection: process in connection.ends, "keepalive watchdog timeout")

        self.later(KEEPALIVE_SECONDS, give_up)

    def _give_up(self, pair: frozenset[int]) -> None:
        if pair in self._apart:
            self._break(lambda c: frozenset(end.host for end in c.ends) == pair, "keepalive watchdog timeout")

    def _break(self, is_hit: Callable[[Connection], bool], why: str) -> None:
        for connection in [connection for connection in self._connections if is_hit(connection)]:
            self.counts["connections broken"] += 1
            self.close(connection)
            connection.broken(why)

    # ------------------------------------------------------------------------------------------------ delivery

    def delay(self) -> float:
        return self.rng.uniform(0.0001, self.faults.slowest_seconds)

    def deliver(self, sender: Process, receiver: Process, function: Callable[..., Any], *args: Any) -> None:
        """Deliver one message; it waits while the hosts are apart."""

        def arrive() -> None:
            if self.are_apart(sender, receiver):
                self.later(_HELD_UP_SECONDS, arrive)
            else:
                receiver.call(function, *args)

        self.later(self.delay(), arrive)


class Pipe:
    """One direction of a stream: delivers in order."""

    def __init__(self, network: Network, sender: Process, receiver: Process) -> None:
        self._network = network
        self._ends = sender, receiver
        self._waiting: deque[tuple[float, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_closed = False

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        network = self._network
        self._waiting.append((network.loop.time() + network.delay(), function, args))
        if len(self._waiting) == 1:
            self._wait_for_first()

    def close(self) -> None:
        """Drop every message in transit."""
        self._is_closed = True

    def _arrive(self) -> None:
        if self._is_closed:
            return
        if self._network.are_apart(*self._ends):
            self._network.later(_HELD_UP_SECONDS, self._arrive)
            return
        _, function, args = self._waiting.popleft()
        self._ends[1].call(function, *args)
        if self._waiting:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self._network.later(max(0.0, self._waiting[0][0] - self._network.loop.time()), self._arrive)


def unreachable(address: str, why: str) -> TandemError:
    return Unavailable(f"{address}: {why}")
