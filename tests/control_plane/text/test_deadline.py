"""Every wait of a request ends at its deadline, and at no other time."""

from __future__ import annotations

import asyncio
import time

import pytest

from control_plane.text.deadline import Deadline
from tandem_runtime.errors import DeadlineExceeded


async def test_a_wait_ends_at_the_deadline_and_says_whose_it_was() -> None:
    deadline = Deadline(time.monotonic() + 0.01, 7.0)
    async with deadline:
        await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match="longer than its 7 seconds"):
        async with deadline:
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_after_the_deadline_no_wait_begins() -> None:
    deadline = Deadline(time.monotonic() - 1, 7.0)
    with pytest.raises(DeadlineExceeded):
        async with deadline:
            pytest.fail("it was entered")


async def test_what_happens_between_two_waits_is_not_cut_short() -> None:
    passed = asyncio.Event()
    deadline = Deadline(time.monotonic(), 7.0)
    asyncio.get_running_loop().call_later(0.02, passed.set)
    await passed.wait()
    with pytest.raises(DeadlineExceeded):
        async with deadline:
            pytest.fail("it was entered")


async def test_somebody_elses_cancel_goes_on_as_one() -> None:
    deadline = Deadline(time.monotonic() + 60, 60.0)
    waits = asyncio.Event()

    async def wait() -> None:
        async with deadline:
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline.close()


async def test_an_error_inside_stays_what_it_was() -> None:
    deadline = Deadline(time.monotonic() + 60, 60.0)
    with pytest.raises(ValueError, match="mine"):
        async with deadline:
            raise ValueError("mine")
    deadline.close()


async def test_no_wait_begins_once_the_timer_has_gone_off_even_if_it_was_early() -> None:
    deadline = Deadline(time.monotonic() + 60, 7.0)
    deadline._pass()
    with pytest.raises(DeadlineExceeded):
        async with deadline:
            pytest.fail("it was entered")
    deadline.close()
