"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.checkpoints import make_checkpoint
from tests.system.fleet import Fleet

SMALL = ("--num-threads", "1", "--num-kv-blocks", "256", "--dtype", "float32")
"""Flags of a worker that is one of several on a small machine."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a small random model of that kind, made once; "demo" is the built-in model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: make_checkpoint(folder, kind)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One prefill and one decode worker with the built-in model, and a KV service; shared by many tests."""
    async with Fleet(tmp_path_factory.mktemp("demo-fleet")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", *SMALL)
        await fleet.ready()
        yield fleet
