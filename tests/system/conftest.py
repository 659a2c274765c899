"""Fixtures of the system tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.checkpoints import make_checkpoint
from tests.system.fleet import Fleet

SMALL = ("--num-threads", "1", "--num-kv-blocks", "256", "--dtype", "float32")
"""Flags of a worker that is one of several on a small machine."""

_PAUSE_SECONDS = 1.0
"""A control plane that stands still for longer may have lost its workers: a heartbeat a second, two to answer it."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a small random model of that kind, made once; "demo" is the built-in model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: make_checkpoint(folder, kind)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started_demo_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("demo-fleet")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", *SMALL)
        await fleet.ready()
        yield fleet


_left: dict[Fleet, float] = {}
"""When the last test with this fleet ended, by the monotonic clock."""


@pytest_asyncio.fixture(loop_scope="session")
async def demo_fleet(started_demo_fleet: Fleet) -> AsyncIterator[Fleet]:
    """One prefill and one decode worker with the built-in model, and a KV service; shared by many tests.

    The session's event loop stands still while tests with loops of their own run, and the control plane with it. The
    workers may have given it up meanwhile: a test begins when they know it again.
    """
    if time.monotonic() - _left.get(started_demo_fleet, 0.0) > _PAUSE_SECONDS:
        await started_demo_fleet.heard()
        await started_demo_fleet.ready()
    yield started_demo_fleet
    _left[started_demo_fleet] = time.monotonic()
