"""Requests wait in a room per model: in order, within bounds, and no model's room delays another's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.dispatch.admission_queue import AdmissionQueue
from tandem_runtime.errors import Draining, Overloaded
from tests.tandem_worker.kv_harness import until

FULL = Overloaded("full")


async def begin(queue: AdmissionQueue, model_id: str, account: str = "a", **options: Any) -> asyncio.Task[None]:
    """Begin to wait; return once the request waits, or was refused."""
    options = {"seconds": 60.0, "in_front": False, **options}
    waiting = asyncio.create_task(queue.wait(model_id, account, FULL, **options))
    await asyncio.sleep(0)
    return waiting


async def test_a_closed_queue_refuses_those_that_wait_and_all_later_ones() -> None:
    queue = AdmissionQueue(8, 60.0)
    waiting = [await begin(queue, model) for model in "mmn"]
    assert (len(queue), dict(queue.num_by_model())) == (3, {"m": 2, "n": 1})
    queue.close(Draining("the gateway stops"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Draining] * 3
    with pytest.raises(Draining):
        await queue.wait("m", "a", FULL, 60.0, in_front=True)
    assert (len(queue), dict(queue.num_by_model())) == (0, {})


async def test_a_release_wakes_the_first_of_its_model_only() -> None:
    queue = AdmissionQueue(8, 60.0)
    m = [await begin(queue, "m") for _ in range(2)]
    n = await begin(queue, "n")
    queue.release_next("m")
    await m[0]
    assert (m[1].done(), n.done()) == (False, False)
    front = await begin(queue, "m", in_front=True)
    queue.release_next("m")
    await front
    queue.release_next("nobody waits for this one")
    queue.release_next("m")
    queue.release_next("n")
    await asyncio.gather(m[1], n)
    assert dict(queue.num_by_model()) == {}, "an empty room is dropped"


async def test_the_tick_tries_the_head_of_every_room() -> None:
    queue = AdmissionQueue(8, 60.0)
    waiting = [await begin(queue, model) for model in "mmnn"]
    await until(lambda: waiting[0].done() and waiting[2].done())


async def test_a_full_room_refuses_with_its_model_and_bound_and_lets_a_moving_request_in() -> None:
    queue = AdmissionQueue(2, 60.0, max_per_account=2)
    waiting = [await begin(queue, "m"), await begin(queue, "m", "b")]
    with pytest.raises(Overloaded, match=r"2 requests wait for m already, the limit is 2; .* --max-waiting$"):
        await queue.wait("m", "c", FULL, 60.0, in_front=False)
    waiting += [await begin(queue, "n", "c"), await begin(queue, "m", "c", in_front=True)]
    assert dict(queue.num_by_model()) == {"m": 3, "n": 1}
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(queue) == 0


@pytest.mark.parametrize(("max_waiting", "setting", "bound"), [(8, 0, 4), (1, 0, 1), (8, 3, 3), (8, 20, 8)])
async def test_an_account_has_a_share_of_each_room(max_waiting: int, setting: int, bound: int) -> None:
    queue = AdmissionQueue(max_waiting, 60.0, setting)
    waiting = [await begin(queue, "m") for _ in range(bound)]
    assert not any(each.done() for each in waiting)
    with pytest.raises(Overloaded, match="wait for m already"):
        await queue.wait("m", "a", FULL, 60.0, in_front=False)
    waiting.append(await begin(queue, "n"))
    if bound < max_waiting:
        with pytest.raises(Overloaded, match=rf"{bound} requests of your account .* --max-waiting-per-account$"):
            await queue.wait("m", "a", FULL, 60.0, in_front=False)
        waiting.append(await begin(queue, "m", "b"))
    assert len(queue) == len(waiting)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    waiting[0] = await begin(queue, "m")
    assert not waiting[0].done(), "whoever left makes place"
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_without_accounts_nobody_is_told_apart() -> None:
    queue = AdmissionQueue(4, 60.0)
    queue.bound_accounts_while(lambda: False)
    waiting = [await begin(queue, "m") for _ in range(4)]
    assert not any(each.done() for each in waiting)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_refusal_comes_after_the_time_and_leaves_no_room() -> None:
    queue = AdmissionQueue(8, 60.0)
    with pytest.raises(Overloaded, match=r"^full$"):
        await queue.wait("m", "a", FULL, 0.0, in_front=False)
    assert dict(queue.num_by_model()) == {}
