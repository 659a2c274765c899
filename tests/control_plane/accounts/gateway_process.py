"""A gateway in a process of its own, with real accounts and a dispatcher that says the same to everybody.

`python -m tests.control_plane.accounts.gateway_process DATABASE_URL GONE_SECONDS [told]`: prints its address once it
listens; a request whose prompt begins with "wait" gets one token and no more. With `told`, it opens the database once
it is told to, by a line on its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from control_plane.accounts.service import Accounts
from control_plane.generation import TokenRequest
from control_plane.storage.database import database_url
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.release import python_path, release_python

HELLO = [*ids_of("Hello world"), 1]
WAIT = ids_of("wait")
_HERE = Path(__file__).parents[3]


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    url: str

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 30)


class Standby:
    """A process that has not opened the database yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.reading: asyncio.Task[bytes] | None = None

    async def begin(self) -> GatewayProcess:
        """Let it open the database, and wait until it listens."""
        assert self.process.stdin is not None, "asked for"
        self.process.stdin.write(b"\n")
        return await self.listening()

    async def listening(self) -> GatewayProcess:
        assert self.process.stdout is not None, "asked for"
        while not (line := (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode()).startswith("http"):
            assert line, "the gateway ended before it listened"
        # or it would stop when its pipe is full of log lines
        self.reading = asyncio.create_task(self.process.stdout.read())
        return GatewayProcess(self.process, line.strip())


@asynccontextmanager
async def gateway_process(url: str, gone_seconds: float = 30.0, root: Path = _HERE) -> AsyncIterator[GatewayProcess]:
    """Start one, of the code in `root`, and wait until it listens; it is killed at the end, should it still run."""
    async with _started(url, gone_seconds, root) as started:
        yield await started.listening()


@asynccontextmanager
async def gateway_on_standby(url: str, gone_seconds: float = 30.0) -> AsyncIterator[Standby]:
    """Start one that imports its code, and waits; it is killed at the end, should it still run."""
    async with _started(url, gone_seconds, _HERE, "told") as started:
        yield started


@asynccontextmanager
async def _started(url: str, gone_seconds: float, root: Path, *told: str) -> AsyncIterator[Standby]:
    python = sys.executable if root == _HERE else release_python()
    command = [python, "-m", "tests.control_plane.accounts.gateway_process", url, str(gone_seconds), *told]
    environment = {**os.environ, "PYTHONPATH": python_path(root)}
    stdin, stdout = (subprocess.PIPE if told else None), subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=root, env=environment, stdin=stdin, stdout=stdout)
    started = Standby(process)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if started.reading is not None:
            await started.reading


async def _main(url: str, gone_seconds: float) -> None:
    drain = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.set)
    accounts = Accounts(database_url(url, Path()), gone_seconds=gone_seconds)
    await accounts.open()
    dispatcher = ScriptedDispatcher()
    dispatcher.choose = _script
    async with serve(dispatcher, accounts=accounts) as gateway:
        running = asyncio.gather(*(loop() for loop in accounts.loops.values()))
        print(gateway.url, flush=True)
        await drain.wait()
        running.cancel()
    await accounts.close()


def _script(request: TokenRequest) -> Script:
    waits = list(request.token_ids[1 : 1 + len(WAIT)]) == WAIT
    return Script(HELLO, pause_after=1 if waits else None)


if __name__ == "__main__":
    if sys.argv[3:] == ["told"]:
        sys.stdin.readline()
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
