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
    lane = Lane("l", 4, max_waiting=8, max_waiting_bytes=100, max_account_bytes=100)
    greedy = [asyncio.ensure_future(lane.take("greedy", 1)) for _ in range(4)]
    await turned()
    assert [task.done() for task in greedy] == [True, True, False, False]
    await lane.take("honest", 1)
    assert lane.num_running == 3
    lane.give_back("greedy", 1)
    await turned()
    assert greedy[2].done() and not greedy[3].done()
    greedy[3].cancel()
    await turned()
    for account in ("greedy", "greedy", "honest"):
        lane.give_back(account, 1)
    assert (lane.num_running, lane.num_waiting, lane.num_waiting_bytes) == (0, 0, 0)


async def test_long_bodies_of_an_account_are_prepared_one_after_the_other_and_short_ones_beside_them() -> None:
    lane = Lane("l", 4, max_waiting=8, max_waiting_bytes=1_000, max_account_bytes=100)
    await lane.take("a", 300)  # alone, a body may have any length
    longer, short = (asyncio.ensure_future(lane.take("a", num_bytes)) for num_bytes in (90, 20))
    await lane.take("b", 90)
    await turned()
    assert not longer.done() and not short.done()
    lane.give_back("a", 300)
    await turned()
    assert longer.done() and not short.done(), "110 bytes are more than 100"
    lane.give_back("a", 90)
    await turned()
    assert short.done()
    waiting, shorter = (asyncio.ensure_future(lane.take("a", num_bytes)) for num_bytes in (90, 30))
    await turned()
    assert not waiting.done() and not shorter.done(), "the turns of an account are in order"
    waiting.cancel()
    await turned()
    assert shorter.done()
    for account, num_bytes in (("a", 20), ("a", 30), ("b", 90)):
        lane.give_back(account, num_bytes)
    assert (lane.num_running, lane.num_waiting, lane.num_waiting_bytes) == (0, 0, 0)
    assert not lane._running_bytes


async def test_accounts_that_wait_take_turns() -> None:
    lane = Lane("l", 1, max_waiting=8, max_waiting_bytes=100, max_account_bytes=100)
    await lane.take("first", 1)
    order: list[str] = []

    async def run(account: str) -> None:
        async with lane.slot(account, 1):
            order.append(account)

    tasks = [asyncio.ensure_future(run(account)) for account in ("a", "a", "a", "b", "c")]
    await turned()
    lane.give_back("first", 1)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "a"]
    assert (lane.num_running, lane.num_waiting) == (0, 0)


async def test_more_requests_or_bytes_than_may_wait_are_refused_with_the_numbers() -> None:
    lane = Lane("l", 1, max_waiting=2, max_waiting_bytes=100, max_account_bytes=100)
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
    lane = Lane("l", 1, max_waiting=8, max_waiting_bytes=100, max_account_bytes=100)
    await lane.take("a", 1)
    leaving, staying = (asyncio.ensure_future(lane.take("b", 1)) for _ in range(2))
    await turned()
    lane.give_back("a", 1)  # the turn is given, but its task has not run
    leaving.cancel()
    await asyncio.wait_for(staying, 10)
    lane.give_back("b", 1)
    assert lane.num_running == 0
