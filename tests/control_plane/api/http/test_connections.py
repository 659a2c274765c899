"""The book of connections: whose time is over, who is refused first, and what counts; with a clock of the test."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from control_plane.api.http.connections import ConnectionLimits, Connections, address_of
from control_plane.api.http.errors import (
    AccountBodiesFull,
    BodiesFull,
    ConnectionsFull,
    RequestTooSlow,
    TooManyUnfinishedHeads,
)
from tandem_runtime.errors import TandemError

LIMITS = ConnectionLimits(max_connections=4, max_unfinished_heads=2, max_bodies_bytes=1_000, max_body_bytes=800)


class Client:
    """A connection that keeps what happens to it."""

    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.is_waiting_for_us = False
        self.ending: TandemError | str | None = None

    def refuse(self, error: TandemError) -> None:
        self.ending = self.ending or error

    def head_timed_out(self, error: TandemError) -> None:
        self.refuse(error)

    def abort(self) -> None:
        self.ending = self.ending or "aborted"


class World:
    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.time = 100.0
        self.connections = Connections(limits, lambda: self.time)

    def open(self, *clients: Client) -> None:
        for client in clients:
            self.connections.opened(client)

    def pass_seconds(self, num: float) -> None:
        """Let the time pass in sweeps of a second."""
        for _ in range(round(num)):
            self.time += 1.0
            self.connections.sweep()


async def test_a_head_has_ten_seconds_and_a_complete_one_has_no_limit() -> None:
    world, slow, quick = World(), Client(), Client("b")
    world.open(slow, quick)
    world.connections.head_ended(quick)
    world.pass_seconds(9)
    assert slow.ending is None
    world.pass_seconds(2)
    assert isinstance(slow.ending, RequestTooSlow) and quick.ending is None


async def test_a_sweep_that_comes_late_refuses_nobody_once() -> None:
    world, client = World(), Client()
    world.open(client)
    world.time += 60.0
    world.connections.sweep()
    assert client.ending is None
    world.time += 60.0
    world.connections.sweep()
    assert isinstance(client.ending, RequestTooSlow)


async def test_the_oldest_unfinished_heads_of_a_crowded_address_go_first_and_other_addresses_stay() -> None:
    world, crowd, other = World(replace(LIMITS, max_connections=10)), [Client() for _ in range(4)], Client("b")
    world.open(*crowd[:2], other, *crowd[2:])
    world.time += 0.5
    world.connections.sweep()
    assert not any(client.ending for client in crowd), "a burst has a second"
    world.pass_seconds(1)
    assert [isinstance(client.ending, TooManyUnfinishedHeads) for client in crowd] == [True, True, False, False]
    assert other.ending is None


async def test_connections_beyond_the_bound_are_refused_then_aborted() -> None:
    world = World()
    clients = [Client(str(index)) for index in range(4 + 256 + 1)]
    world.open(*clients)
    assert not any(client.ending for client in clients[:4])
    assert all(isinstance(client.ending, ConnectionsFull) for client in clients[4:-1])
    assert clients[-1].ending == "aborted"


@pytest.mark.parametrize(
    ("rate", "words"), [(0, "no byte of the body"), (500, "the least is 1,024"), (2_000, "after 120 s"), (None, None)]
)
async def test_a_body_needs_a_rate_and_an_end(rate: int | None, words: str | None) -> None:
    world, client = World(replace(LIMITS, max_bodies_bytes=10**9, max_body_bytes=10**9)), Client()
    world.open(client)
    world.connections.head_ended(client)
    body = world.connections.body_began(client, None)
    client.is_waiting_for_us = rate is None  # reading is paused: the silence is ours
    for _ in range(125):
        if client.ending is None and rate:
            world.connections.body_received(body, rate)
        world.pass_seconds(1)
    assert (client.ending is None) if words is None else words in str(client.ending)


async def test_a_body_beyond_the_room_of_all_is_refused_and_one_that_stands_still_goes_before() -> None:
    world, first, second = World(), Client(), Client()
    world.open(first, second)
    body = world.connections.body_began(first, 800)
    world.connections.body_received(body, 700)
    with pytest.raises(BodiesFull, match="700 bytes and this one up to 400 more, the limit is 1,000"):
        world.connections.body_began(second, 400)
    world.time += 1.5
    other = world.connections.body_began(second, 400)
    assert isinstance(first.ending, RequestTooSlow)
    world.connections.body_received(other, 400)
    assert world.connections.num_body_bytes == 400
    world.connections.closed(first)
    world.connections.release(other)
    assert world.connections.num_body_bytes == 0


async def test_one_account_s_bodies_have_a_room_of_their_own() -> None:
    limits = replace(LIMITS, max_account_bodies_bytes=500)
    world, (first, second, third, other) = World(limits), (Client() for _ in range(4))
    connections = world.connections
    world.open(first, second, third, other)
    bodies = [connections.body_began(client, None) for client in (first, second, other)]
    connections.body_received(bodies[0], 300)  # before the account is known
    connections.body_belongs_to(bodies[0], "a")
    connections.body_belongs_to(bodies[1], "a")
    connections.body_belongs_to(bodies[2], "b")
    with pytest.raises(AccountBodiesFull, match="have 300 bytes and this one up to 201 more, the limit is 500"):
        connections.body_received(bodies[1], 201)
    connections.body_received(bodies[2], 400)
    with pytest.raises(AccountBodiesFull, match="this one up to 300 more"):  # by its Content-Length
        connections.body_belongs_to(connections.body_began(third, 300), "a")
    connections.body_ended(first)
    connections.release(bodies[0])
    world.time += 1.5
    connections.body_received(bodies[1], 500)
    assert not any(client.ending for client in (first, second, other))
    world.time += 1.5
    late = connections.body_began(first, None)
    connections.body_belongs_to(late, "a")
    connections.body_received(late, 100)
    assert isinstance(second.ending, RequestTooSlow) and not other.ending, "the account's own makes room"
    for client in (first, second, third, other):
        connections.closed(client)
    assert not connections._account_bytes and connections.num_body_bytes == 0


async def test_whatever_happens_the_counts_are_those_of_the_connections_that_are_left() -> None:
    limits = replace(LIMITS, max_connections=50, max_bodies_bytes=10**9)
    chance, world, clients = random.Random(7), World(limits), list[Client]()
    connections = world.connections
    for _ in range(3_000):
        if len(clients) < 40 and chance.random() < 0.3:
            clients.append(Client(chance.choice("abc")))
            world.open(clients[-1])
        elif clients:
            client = chance.choice(clients)
            match chance.randrange(6):
                case 0:
                    connections.head_began(client)
                case 1:
                    connections.head_ended(client)
                case 2:
                    body = connections.body_began(client, 10)
                    connections.body_received(body, chance.randrange(1, 20))
                    if chance.random() < 0.7:
                        connections.body_belongs_to(body, chance.choice("abc"))
                        connections.body_received(body, chance.randrange(1, 20))
                case 3:
                    connections.body_ended(client)
                case 4:
                    connections.lingers(client)
                case _:
                    connections.closed(client)
                    clients.remove(client)
        held = [body for bodies in connections._held.values() for body in bodies]
        assert connections.num_body_bytes == sum(body.num_held_bytes for body in held)
        of_accounts = Counter[str]()
        for body in held:
            of_accounts[body.account or ""] += body.num_held_bytes
        assert {**of_accounts, "": 0} == {**connections._account_bytes, "": 0}
        assert sum(connections._num_heads.values()) == len(connections._heads)
        assert connections.counts["open"] == len(clients)
    for client in clients:
        connections.closed(client)
    assert not any(connections.counts.values()) and not connections._num_heads
    assert connections.num_body_bytes == 0 and not connections._held


async def test_refusals_are_one_line_per_sweep_and_reason() -> None:
    world = World()
    with capture_logs() as logs:
        for _ in range(500):
            world.connections.refused("RequestTooSlow")
        world.connections.refused("HeadTooLarge")
        world.pass_seconds(2)
    lines = [(line["event"], line["reason"], line["num"]) for line in logs]
    assert lines == [("http_refused", "RequestTooSlow", 500), ("http_refused", "HeadTooLarge", 1)]


def test_an_address_is_an_ipv4_address_or_a_64_of_ipv6() -> None:
    assert address_of(("10.0.0.7", 1)) == address_of(("::ffff:10.0.0.7", 2)) == "10.0.0.7"
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:2", 1)) == "2001:db8::"
    assert address_of(("2001:db8:0:1::1", 1)) != address_of(("2001:db8::1", 1))
    assert address_of(("fe80::1%eth0", 1)) == "fe80::" and address_of(None) == ""


@pytest.mark.parametrize(("files", "expected"), [(65_536, 16_384), (1_024, 512), (4_096, 3_328)])
def test_connections_leave_files_for_the_process_itself(files: int, expected: int) -> None:
    assert ConnectionLimits().within(files).max_connections == expected
