"""Requests wait in a room per model: in a fair order, within bounds, and no model's room delays another's."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from control_plane.admission.budgets import BudgetTable
from control_plane.admission.model_admission import Waiter
from control_plane.admission.service_classes import ServiceClass
from control_plane.dispatch import admission_queue
from control_plane.dispatch.admission_queue import AdmissionQueue
from tandem_runtime.errors import Draining, Overloaded, Unavailable

FULL = "full"


def queue_of(max_waiting: int = 8, max_per_account: int = 0) -> AdmissionQueue:
    return AdmissionQueue(max_waiting, 60.0, max_per_account, rng=random.Random(1))


async def begin(
    queue: AdmissionQueue, model_id: str, account: str = "a", seconds: float = 60.0, **of_waiter: Any
) -> asyncio.Task[None]:
    """Begin to wait; return once the request waits, or was refused."""
    waiter = Waiter(model_id, account, **of_waiter)
    waiting = asyncio.create_task(queue.wait(waiter, Overloaded(FULL), seconds))
    await asyncio.sleep(0)
    return waiting


async def end(*waiting: asyncio.Task[None]) -> None:
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_closed_queue_refuses_those_that_wait_and_all_later_ones() -> None:
    queue = queue_of()
    waiting = [await begin(queue, model) for model in "mmn"]
    assert (len(queue), dict(queue.num_by_model())) == (3, {"m": 2, "n": 1})
    queue.close(Draining("the gateway stops"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Draining] * 3
    with pytest.raises(Draining):
        await queue.wait(Waiter("m", "a", is_moving=True), Overloaded(FULL), 60.0)
    assert (len(queue), dict(queue.num_by_model())) == (0, {})


async def test_a_release_wakes_the_first_of_its_model_only() -> None:
    queue = queue_of()
    m = [await begin(queue, "m") for _ in range(2)]
    n = await begin(queue, "n")
    queue.release_next("m")
    await m[0]
    assert (m[1].done(), n.done()) == (False, False)
    moving = await begin(queue, "m", is_moving=True)
    queue.release_next("m")
    await moving
    queue.release_next("nobody waits for this one")
    queue.release_next("m")
    queue.release_next("n")
    await asyncio.gather(m[1], n)
    assert dict(queue.num_by_model()) == {}, "an empty room counts for nothing"


async def test_whoever_is_let_in_lets_the_next_one_look_without_waiting_for_its_workers() -> None:
    queue = queue_of()
    waiters = [Waiter("m", "a") for _ in range(4)]
    has_room = 3

    async def start(waiter: Waiter) -> None:
        nonlocal has_room
        await queue.wait(waiter, Overloaded(FULL), 60.0)
        while not has_room:
            await queue.wait(waiter, Overloaded(FULL), 60.0)
        has_room -= 1
        queue.let_in(waiter)

    waiting = [asyncio.create_task(start(waiter)) for waiter in waiters]
    await asyncio.sleep(0)
    queue.release_next("m")  # one event
    await asyncio.gather(*waiting[:3])
    await asyncio.sleep(0)
    assert not waiting[3].done() and queue.num_waiting("m") == 1, "there was no room for the fourth"
    has_room = 1
    queue.release_next("m")
    await waiting[3]


async def test_a_request_that_found_no_room_has_its_place_again() -> None:
    queue = queue_of()
    first, second = Waiter("m", "a"), Waiter("m", "a")
    turns = [asyncio.create_task(queue.wait(each, Overloaded(FULL), 60.0)) for each in (first, second)]
    await asyncio.sleep(0)
    queue.release_next("m")
    await turns[0]
    again = asyncio.create_task(queue.wait(first, Overloaded(FULL), 60.0))
    await asyncio.sleep(0)
    queue.release_next("m")
    await again
    assert not turns[1].done()
    await end(*turns)


async def test_a_request_that_looks_for_room_keeps_its_place() -> None:
    queue = queue_of(2, 2)
    looking, waiting = Waiter("m", "a"), await begin(queue, "m", "b")
    turn = asyncio.create_task(queue.wait(looking, Overloaded(FULL), 60.0))
    await end(waiting)
    waiting = await begin(queue, "m", "b")
    queue.release_next("m")
    await turn
    queue.let_in(looking)  # sent to a worker, which may refuse
    await waiting  # the next one looks
    with pytest.raises(Overloaded, match="2 requests wait for m already"):
        await queue.wait(Waiter("m", "c"), Overloaded(FULL), 60.0)
    queue.gone(looking)
    late = await begin(queue, "m", "c")
    assert not late.done()
    await end(late)


async def test_a_turn_whose_request_leaves_in_the_same_moment_is_the_next_ones() -> None:
    queue = queue_of()
    leaving, next_one = await begin(queue, "m"), await begin(queue, "m")
    queue.release_next("m")
    leaving.cancel()
    await next_one
    assert leaving.cancelled()


async def test_a_report_without_room_is_looked_at_now_and_then_only() -> None:
    now = 100.0
    queue = AdmissionQueue(8, 60.0, clock=lambda: now)
    waiting = await begin(queue, "m", num_tokens=50)
    asked: list[int] = []

    def is_full(waiter: Waiter) -> bool:
        asked.append(waiter.num_tokens)
        return False

    queue.reported("m", is_full)
    await asyncio.sleep(0)
    assert not waiting.done() and asked == [50]
    now += 0.6
    queue.reported("m", is_full)
    await waiting
    waiting = await begin(queue, "m")
    queue.reported("m", lambda waiter: True)
    await waiting


async def test_a_full_room_refuses_with_its_model_and_bound_and_lets_a_moving_request_in() -> None:
    queue = queue_of(2, 2)
    waiting = [await begin(queue, "m"), await begin(queue, "m", "b")]
    with pytest.raises(Overloaded, match=r"2 requests wait for m already, the limit is 2; .* --max-waiting$"):
        await queue.wait(Waiter("m", "c"), Overloaded(FULL), 60.0)
    waiting += [await begin(queue, "n", "c"), await begin(queue, "m", "c", is_moving=True)]
    assert dict(queue.num_by_model()) == {"m": 3, "n": 1}
    await end(*waiting)
    assert len(queue) == 0


@pytest.mark.parametrize(("max_waiting", "setting", "bound"), [(8, 0, 4), (1, 0, 1), (8, 3, 3), (8, 20, 8)])
async def test_an_account_has_a_share_of_each_room(max_waiting: int, setting: int, bound: int) -> None:
    queue = queue_of(max_waiting, setting)
    waiting = [await begin(queue, "m") for _ in range(bound)]
    assert not any(each.done() for each in waiting)
    with pytest.raises(Overloaded, match="wait for m already"):
        await queue.wait(Waiter("m", "a"), Overloaded(FULL), 60.0)
    waiting.append(await begin(queue, "n"))
    if bound < max_waiting:
        with pytest.raises(Overloaded, match=rf"{bound} requests of your account .* --max-waiting-per-account$"):
            await queue.wait(Waiter("m", "a"), Overloaded(FULL), 60.0)
        waiting.append(await begin(queue, "m", "b"))
    assert len(queue) == len(waiting)
    await end(waiting[0])
    waiting[0] = await begin(queue, "m")
    assert not waiting[0].done(), "whoever left makes place"
    await end(*waiting)


async def test_without_accounts_nobody_is_told_apart() -> None:
    queue = queue_of(4)
    queue.bound_accounts_while(lambda: False)
    waiting = [await begin(queue, "m") for _ in range(4)]
    assert not any(each.done() for each in waiting)
    await end(*waiting)


async def test_the_batch_class_leaves_half_of_a_room_to_others() -> None:
    queue = queue_of(4, 4)
    waiting = [await begin(queue, "m", service_class=ServiceClass.BATCH) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests of the batch class wait for m already, the limit is 2"):
        await queue.wait(Waiter("m", "b", ServiceClass.BATCH), Overloaded(FULL), 60.0)
    waiting.append(await begin(queue, "m"))
    queue.release_next("m")
    await waiting[2]
    await end(*waiting)


async def test_a_refusal_comes_after_the_time_and_leaves_no_room() -> None:
    queue = queue_of()
    with pytest.raises(Overloaded, match=r"^full$"):
        await queue.wait(Waiter("m", "a"), Overloaded(FULL), 0.0)
    with pytest.raises(Unavailable) as raised:
        await queue.wait(Waiter("m", "a"), Unavailable("gone", retry_after_seconds=2.0), 0.0)
    assert raised.value.retry_after_seconds == 2.0, "when a worker is back is not a matter of the queue"
    assert dict(queue.num_by_model()) == {}


async def test_a_wait_that_ended_while_this_process_stood_still_goes_on_until_what_came_meanwhile_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by chaos: a gateway that had been stopped refused a request whose worker had become ready meanwhile."""
    now = 100.0
    queue = AdmissionQueue(8, 60.0, clock=lambda: now)
    times = [asyncio.create_task(queue.wait(Waiter("m", "a"), Unavailable("gone"), 0.0)) for _ in range(2)]
    await asyncio.sleep(0)
    now += 13.0  # both waits end at the next turn of the loop, 13 s late
    monkeypatch.setattr(admission_queue, "_READ_SECONDS", 60.0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [each.done() for each in times] == [False, False]
    queue.release_next("m")
    await asyncio.wait_for(times[0], 10)
    await end(times[1])
    monkeypatch.setattr(admission_queue, "_READ_SECONDS", 0.0)
    late = asyncio.create_task(queue.wait(Waiter("m", "a"), Unavailable("gone"), 0.0))
    await asyncio.sleep(0)
    now += 13.0
    with pytest.raises(Unavailable, match="gone"):
        await asyncio.wait_for(late, 10)


async def test_no_wait_goes_on_beyond_the_clients_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by chaos: a starved gateway's wait went on for two seconds more, and ended 3.6 s after the deadline."""
    now = 100.0
    queue = AdmissionQueue(8, 60.0, clock=lambda: now)
    monkeypatch.setattr(admission_queue, "_READ_SECONDS", 60.0)
    waiters = [Waiter("m", "a", deadline=112.0), Waiter("m", "a", deadline=114.0)]
    over, not_over = [asyncio.create_task(queue.wait(each, Unavailable("gone"), 0.0)) for each in waiters]
    await asyncio.sleep(0)
    now += 13.0
    with pytest.raises(Unavailable, match="gone"):
        await asyncio.wait_for(over, 10)
    assert not not_over.done()
    await end(not_over)


async def test_a_request_may_look_again_after_a_time_of_its_own() -> None:
    queue = queue_of()
    await asyncio.wait_for(queue.wait(Waiter("m", "a"), Overloaded(FULL), 60.0, retry_in=0.0), 10)
    assert len(queue) == 0


async def test_retry_after_is_the_predicted_wait_with_jitter() -> None:
    now = 100.0
    queue = AdmissionQueue(100, 60.0, rng=random.Random(1), clock=lambda: now)
    waiting = [await begin(queue, "m", account, cost_ms=1000.0) for account in "abcdefghij"]
    newcomer = Waiter("m", "new", cost_ms=1000.0)
    assert 0.5 <= queue.retry_after_seconds(newcomer) <= 1.5, "nothing was let in yet"
    for _ in range(4):  # 1,000 ms of devices a second
        now += 1.0
        queue.release_next("m")
        await asyncio.sleep(0)
        queue.room("m").let_in(Waiter("m", "x", cost_ms=1000.0, order=0), 0.0, now)
    drawn = [queue.retry_after_seconds(newcomer) for _ in range(200)]
    assert 3.0 <= min(drawn) < 4.5 and 9.0 < max(drawn) <= 11.0, "six wait, and it would be the seventh: about 7 s"
    await end(*waiting)


async def test_a_request_that_would_wait_longer_than_its_models_budget_is_refused_at_once() -> None:
    now = 100.0
    budgets = BudgetTable.parse(("m=5/0",))
    queue = AdmissionQueue(100, 60.0, rng=random.Random(1), clock=lambda: now, budgets=budgets)
    waiting = [await begin(queue, "m", cost_ms=1000.0) for _ in range(8)]
    for each in waiting[:4]:  # 1,000 ms of devices a second
        now += 1.0
        queue.release_next("m")
        await each
        queue.room("m").let_in(Waiter("m", "a", cost_ms=1000.0, order=0), 0.0, now)
    for waiter, is_late in (
        (Waiter("m", "a", cost_ms=4000.0), True),
        (Waiter("m", "a", cost_ms=1.0), True),
        (Waiter("m", "b", cost_ms=4000.0), False),
        (Waiter("m", "a", ServiceClass.BATCH, cost_ms=4000.0), False),
        (Waiter("m", "a", ServiceClass.PRIORITY, cost_ms=4000.0), False),
    ):
        if is_late:
            with pytest.raises(Overloaded, match=r"for about \d s, more than 2.5 s, the safe part") as raised:
                queue.refuse_early(waiter, 60.0)
            assert raised.value.retry_after_seconds is not None and 2 <= raised.value.retry_after_seconds <= 12
            with pytest.raises(Overloaded, match="its limit of 5 s"):
                await queue.wait(waiter, Overloaded(FULL), 60.0)
        else:
            queue.refuse_early(waiter, 60.0)
    assert queue.num_waiting("m") == 4, "what is refused leaves nothing"
    queue.refuse_early(Waiter("n", "a", cost_ms=1e9), 60.0)
    await end(*waiting)


async def test_what_may_not_wait_is_refused_before_it_is_prepared() -> None:
    queue = queue_of(4, 2)
    waiting = [await begin(queue, "m") for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests of your account wait"):
        queue.refuse_early(Waiter("m", "a"), 60.0)
    queue.refuse_early(Waiter("m", "b"), 60.0)
    assert queue.num_waiting("m") == 2
    await end(*waiting)


async def test_a_request_waits_for_room_no_longer_than_its_budget() -> None:
    queue = AdmissionQueue(8, 60.0, budgets=BudgetTable.parse(("m=0.02/0",)))
    with pytest.raises(Overloaded, match=FULL):
        await asyncio.wait_for(queue.wait(Waiter("m", "a"), Overloaded(FULL), 60.0), 10)
    batch = await begin(queue, "m", service_class=ServiceClass.BATCH)
    moving = await begin(queue, "m", is_moving=True)
    lost = asyncio.create_task(queue.wait(Waiter("m", "a"), Unavailable("no worker"), 0.2))
    with pytest.raises(Unavailable):
        await lost
    assert not batch.done() and not moving.done()
    await end(batch, moving)
