"""Accounts take turns, hold half of the slots at most, and what waits is bounded."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.text_processes.lanes import Lane
from tandem_runtime.errors import Overloaded


async def turned() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_account_holds_half_of_the_slots_and_others_find_the_rest() -> None:
    lane = Lane("l", 4, max_waiting=8, max_waiting_bytes=100)
    greedy = [asyncio.ensure_future(lane.take("greedy", 1)) for _ in range(4)]
    await turned()
    assert [task.done() for task in greedy] == [True, True, False, False]
    await lane.take("honest", 1)
    assert lane.num_running == 3
    lane.give_back("greedy")
    await turned()
    assert greedy[2].done() and not greedy[3].done()
    greedy[3].cancel()
    await turned()
    for account in ("greedy", "greedy", "honest"):
        lane.give_back(account)
    assert (lane.num_running, lane.num_waiting, lane.num_waiting_bytes) == (0, 0, 0)


async def test_accounts_that_wait_take_turns() -> None:
    lane = Lane("l", 1, max_waiting=8, max_waiting_bytes=100)
    await lane.take("first", 1)
    order: list[str] = []

    async def run(account: str) -> None:
        async with lane.slot(account, 1):
            order.append(account)

    tasks = [asyncio.ensure_future(run(account)) for account in ("a", "a", "a", "b", "c")]
    await turned()
    lane.give_back("first")
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "a"]
    assert (lane.num_running, lane.num_waiting) == (0, 0)


async def test_more_requests_or_bytes_than_may_wait_are_refused_with_the_numbers() -> None:
    lane = Lane("l", 1, max_waiting=2, max_waiting_bytes=100)
    await lane.take("a", 1)
    waiting = [asyncio.ensure_future(lane.take("a", 50))]
    await turned()
    with pytest.raises(Overloaded, match=r"1 requests of 50 bytes wait.*2 requests of 100 bytes may"):
        await lane.take("b", 51)
    waiting.append(asyncio.ensure_future(lane.take("b", 50)))
    await turned()
    with pytest.raises(Overloaded, match="2 requests"):
        await lane.take("c", 0)
    for task in waiting:
        task.cancel()
    await turned()
    assert (lane.num_waiting, lane.num_waiting_bytes) == (0, 0)


async def test_a_turn_that_comes_as_its_waiter_leaves_goes_to_the_next() -> None:
    lane = Lane("l", 1, max_waiting=8, max_waiting_bytes=100)
    await lane.take("a", 1)
    leaving, staying = (asyncio.ensure_future(lane.take("b", 1)) for _ in range(2))
    await turned()
    lane.give_back("a")  # the turn is given, but its task has not run
    leaving.cancel()
    await asyncio.wait_for(staying, 10)
    lane.give_back("b")
    assert lane.num_running == 0
