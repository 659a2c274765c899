"""A gateway that was stopped does not take its own standstill for its workers' silence."""

from __future__ import annotations

import time

from control_plane.dispatch.stall_watch import StallWatch
from tests.control_plane.fleet.test_worker_health import World


async def test_a_look_that_comes_late_leaves_its_lateness_out_of_what_calls_have_waited() -> None:
    world = World("ab")
    call, stalls = world.send("a"), StallWatch(world.health)
    call.accepted()
    world.now += 60.0
    stalls._tick(time.perf_counter() - 60.0)
    stalls._tick(time.perf_counter())
    assert not call.has_failed and world.stalled() == []
    world.now += 10.1
    assert world.stalled() == [call]
