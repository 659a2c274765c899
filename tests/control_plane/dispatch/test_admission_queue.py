"""The queue of waiting requests, when its gateway stops."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.dispatch.admission import AdmissionQueue
from tandem_runtime.errors import Draining, Overloaded


async def test_a_closed_queue_refuses_those_that_wait_and_all_later_ones() -> None:
    queue, full = AdmissionQueue(8, 60.0), Overloaded("full")
    waiting = [asyncio.create_task(queue.wait(full, 60.0, in_front=False)) for _ in range(3)]
    await asyncio.sleep(0)  # each waits now
    assert len(queue) == 3
    queue.close(Draining("the gateway stops"))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Draining] * 3
    with pytest.raises(Draining):
        await queue.wait(full, 60.0, in_front=True)
    assert len(queue) == 0
