"""An engine that was killed for lack of memory is said to be, by the kernel's own count."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tandem_engine.client import EngineClient
from tandem_engine.messages import EngineFailed
from tandem_engine.settings import EngineConfig
from tests.tandem_machine.cgroup_tree import put_into_cgroup


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            "oom_kill 0\n",
            "oom_kill 1\n",
            ": out of memory, by the kernel's count of such kills (oom_kill 0 before, 1 now)",
        ),
        ("oom_kill 3\n", "oom_kill 3\n", "(not for memory: the kernel has counted no such kill since, oom_kill is 3)"),
    ],
)
async def test_an_engine_killed_for_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, now: str, said: str
) -> None:
    put_into_cgroup(tmp_path, monkeypatch, "0::/\n", {"memory.events": before})
    client = await EngineClient.start(EngineConfig("m"))
    (tmp_path / "memory.events").write_text(now)
    os.kill(client.pid, signal.SIGKILL)
    *_, failed = [event async for event, _ in client.events()]
    await client.stop()
    assert isinstance(failed, EngineFailed)
    assert "was ended by SIGKILL" in failed.message and said in failed.message
