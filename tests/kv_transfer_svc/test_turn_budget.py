"""What many calls do to blocks is spread over the turns of the loop, first come first served."""

from __future__ import annotations

import asyncio

from kv_transfer_svc.turn_budget import TurnBudget


async def test_many_ready_tasks_share_a_turn_and_go_in_order() -> None:
    budget, done = TurnBudget(10), []

    async def call(number: int) -> None:
        await budget.take(5)
        done.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(20)]
    most = 0
    while not all(task.done() for task in tasks):
        num_before = len(done)
        await asyncio.sleep(0)
        most = max(most, len(done) - num_before)
    assert most == 2 and done == list(range(20))


async def test_alone_nobody_waits() -> None:
    budget = TurnBudget(10)
    await asyncio.wait_for(budget.take(1_000), 10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    taking = asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    assert taking.done()


async def test_a_cancelled_task_spends_nothing() -> None:
    budget = TurnBudget(1)
    first, second = asyncio.create_task(budget.take(1)), asyncio.create_task(budget.take(1))
    await budget.take(1)
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(10):
        await second
    assert first.cancelled()
