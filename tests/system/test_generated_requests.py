"""Generated requests do not break a real fleet. (`make schemathesis` sends more, to scripted workers.)"""

from __future__ import annotations

import asyncio

import pytest

from tests.control_plane.api.generated_requests import send_all
from tests.system.fleet import Fleet
from tests.system.streams import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_hundred_generated_requests_are_answered_as_documented_and_leave_nothing(demo_fleet: Fleet) -> None:
    url = demo_fleet.base_url
    seen = await asyncio.to_thread(lambda: send_all(url, 100, None, models=(MODEL,), max_tokens=3))
    assert max(seen.statuses) < 500 and seen.statuses[200] > 10
    await demo_fleet.pools_are_full()
