"""Two hosts of one engine, two processes on loopback: they answer as one, and each ends with the other."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem_engine.client import EngineClient
from tandem_engine.messages import EngineFailed, Ready
from tandem_worker.vllm_program import vllm_program
from tests.ports import free_ports
from tests.tandem_vllm.test_ranks_in_vllm import SAMPLINGS, answers, answers_at_once, of_one_rank
from tests.tandem_vllm.test_vllm_process import config, next_of

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(400),  # engines start one after the other
]


@asynccontextmanager
async def two_hosts(
    folder: Path, port: int, flags: str
) -> AsyncIterator[tuple[EngineClient, Any, asyncio.subprocess.Process]]:
    """Start a leader and a follower; in the end none of their processes may be left."""
    command = ["-m", "tandem_worker.vllm_follower", "--leader", f"127.0.0.1:{port}", "--state-dir", str(folder / "b")]
    follower = await asyncio.create_subprocess_exec(sys.executable, *command)
    given = (*flags.split(), "--nnodes", "2", "--master-port", str(port))
    leader = await EngineClient.start(config(engine_args=given), vllm_program(PYTHON, folder / "a"))
    events = leader.events()
    processes = [psutil.Process(leader.pid), psutil.Process(follower.pid)]
    try:
        ready = await next_of(events, Ready, EngineFailed)
        assert isinstance(ready, Ready), ready
        assert ready.model.numerics_class.split("/")[4].endswith("-hosts2")
        processes += [child for each in processes for child in each.children(recursive=True)]
        yield leader, events, follower
    finally:
        for process in processes:
            if process.is_running() and process.pid == leader.pid:
                process.kill()
        await leader.stop()
        if follower.returncode is None:
            follower.send_signal(signal.SIGINT)
        await follower.wait()
    _, left = psutil.wait_procs(processes, timeout=30)
    assert not left


async def answers_are_of_one_rank(leader: EngineClient, events: Any, folder: Path) -> None:
    expected = await of_one_rank(folder)
    assert await answers(leader, events) == expected
    at_once = await answers_at_once(leader, events, num_each=2)
    assert at_once == {f"{name} 1": expected[name] for name in SAMPLINGS}


async def test_two_hosts_of_tensor_parallelism_and_none_stays_without_the_other(tmp_path: Path) -> None:
    [port] = free_ports(1)
    # 1. the follower is killed: the engine ends, and says why
    async with two_hosts(tmp_path, port, "--tensor-parallel-size 2") as (leader, events, follower):
        await answers_are_of_one_rank(leader, events, tmp_path)
        follower.kill()
        failed = await next_of(events, EngineFailed)
        assert "host 127.0.0.1 of this engine is gone" in failed.message
    # 2. both are started again, at the same port; a follower that is to end goes on until its leader has ended
    async with two_hosts(tmp_path, port, "--tensor-parallel-size 2") as (leader, events, follower):
        follower.send_signal(signal.SIGTERM)
        await answers_are_of_one_rank(leader, events, tmp_path)
        psutil.Process(leader.pid).kill()
        assert await follower.wait() == 0


async def test_two_hosts_of_pipeline_parallelism_end_when_a_rank_of_the_follower_does(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with two_hosts(tmp_path, port, "--pipeline-parallel-size 2") as (leader, events, follower):
        await answers_are_of_one_rank(leader, events, tmp_path)
        (rank,) = [each for each in psutil.Process(follower.pid).children() if "Worker" in each.cmdline()[0]]
        rank.kill()
        assert await follower.wait() == 1
        await next_of(events, EngineFailed)
