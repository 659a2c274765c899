"""Waiting for one worker costs no task; waiting for several ends with the first refusal."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.dispatch.request_starter import _all
from tandem_runtime.errors import Overloaded


async def test_one_wait_runs_in_the_task_of_its_request() -> None:
    async def accepted() -> object:
        return asyncio.current_task()

    assert await _all([accepted()]) == [asyncio.current_task()]


async def test_the_first_refusal_cancels_the_other_waits() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def refused() -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded, match="full"):
        await _all([waits(), refused()])
    assert ended == ["waits"]
