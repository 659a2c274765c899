"""How does one life of workerd start, tell where it listens, and end?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.worker_config import ConfigUnusable

START_SECONDS = 30.0
_EXAMPLE = Path(__file__).parents[2] / "examples" / "worker"


def find_workerd(folder: Path) -> Path:
    """Return the nearest workerd that npm has installed, the example's, or the PATH's; raises ConfigUnusable."""
    for parent in (folder, *folder.parents, _EXAMPLE):
        modules = parent / "node_modules"
        # The program itself: npm's wrapper around it needs Node.js, and would not take it along when it ends.
        for path in sorted(modules.glob("@cloudflare/workerd-*/bin/workerd")):
            return path
    if on_path := shutil.which("workerd"):
        return Path(on_path)
    raise ConfigUnusable(f"workerd is not installed: run `npm install --save-dev workerd` in {folder}")


class WorkerdEnded(Exception):
    """workerd ended before it listened; it has said why on stderr."""


class Workerd:
    """A running workerd."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port

    @classmethod
    async def start(cls, workerd: Path, config: Path, port: int) -> Workerd:
        """Return once it listens on `port` of the loopback, or on a free one for 0; raises WorkerdEnded."""
        read_end, write_end = os.pipe()
        command = [
            *(str(workerd), "serve", str(config)),
            *(f"--socket-addr=http=127.0.0.1:{port}", f"--control-fd={write_end}"),
        ]
        try:
            # A session of its own: Ctrl-C in a terminal reaches only us, who end it.
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(command), pass_fds=[write_end], start_new_session=True
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        try:
            async with asyncio.timeout(START_SECONDS):
                return cls(process, await _listening_port(read_end))
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise WorkerdEnded(f"workerd did not listen within {START_SECONDS:g} s") from error
            raise

    async def ended(self) -> int:
        """Wait for its end and return the exit code."""
        return await self._process.wait()

    async def stop(self) -> None:
        await _end(self._process)


async def _listening_port(control: int) -> int:
    """Read what workerd says first on its control pipe: that it listens, and where. Closes the pipe."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(control, "rb", 0)
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    if not line:
        raise WorkerdEnded("workerd ended before it listened; what it says of that is above")
    return int(json.loads(line)["port"])


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it: asked to end, it would wait for streams that still run."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
