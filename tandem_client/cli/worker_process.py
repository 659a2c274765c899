"""How does one life of workerd start, listen where we do, and end?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.worker_config import ConfigUnusable
from tandem_client.cli.worker_errors import Pump
from tandem_client.cli.worker_npm import find_program, with_parents

START_SECONDS = 30.0
_EXAMPLE = Path(__file__).parents[2] / "examples" / "worker"
# The program itself: npm's wrapper around it needs Node.js, and would not take it along when it ends.
_PROGRAM = "@cloudflare/workerd-*/bin/workerd"


def find_workerd(folder: Path) -> Path:
    """Return the nearest workerd that npm has installed, the example's, or the PATH's; raises ConfigUnusable."""
    if found := find_program((*with_parents(folder), _EXAMPLE), _PROGRAM):
        return found
    if on_path := shutil.which("workerd"):
        return Path(on_path)
    raise ConfigUnusable(f"workerd is not installed: run `npm install --save-dev workerd` in {folder}")


def newest_date(workerd: Path) -> str | None:
    """Return the newest compatibility_date that a workerd of npm knows, by its version; None for another's."""
    try:
        version = json.loads((workerd.parents[1] / "package.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    day = re.match(r"1\.(\d{4})(\d{2})(\d{2})\.", str(version))
    return "-".join(day.groups()) if day else None


def listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` of the loopback, on a free one for 0; raises ConfigUnusable."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except PermissionError as error:
        listener.close()
        raise ConfigUnusable(f"may not listen on port {port}: {error.strerror}; choose one above 1023") from error
    except OSError as error:
        listener.close()
        other = port + 1 if port < 65535 else 0
        raise ConfigUnusable(
            f"port {port} is in use; stop what listens there, or choose another: --port {other}"
        ) from error
    return listener


class WorkerdEnded(Exception):
    """workerd ended when it should not have; the message has what it said."""


class Workerd:
    """A running workerd."""

    def __init__(self, process: asyncio.subprocess.Process, pump: Pump) -> None:
        self._process = process
        self._pump = pump

    @classmethod
    async def start(
        cls,
        workerd: Path,
        config: Path,
        listener: socket.socket,
        write: Callable[[str], None],
        located: Callable[[str], str],
    ) -> Workerd:
        """Return once it takes requests from `listener`, which others may do too; raises WorkerdEnded.

        `write` gets each line for the Worker's author, after `located` has found the places in it.
        """
        read_end, write_end = os.pipe()
        command = [
            *(str(workerd), "serve", str(config), "--verbose"),
            *(f"--socket-fd=http={listener.fileno()}", f"--control-fd={write_end}"),
        ]
        try:
            # A session of its own: Ctrl-C in a terminal reaches only us, who end it.
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                pass_fds=[listener.fileno(), write_end],
                start_new_session=True,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        assert process.stderr is not None, "it is a pipe"
        pump = Pump(process.stderr, write, located)
        try:
            async with asyncio.timeout(START_SECONDS):
                listens = await _first_word(read_end)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise WorkerdEnded(f"workerd did not listen within {START_SECONDS:g} s") from error
            raise
        if not listens:
            await _end(process)
            raise WorkerdEnded(await pump.all() or "workerd ended before it listened, and did not say why")
        pump.release()
        return cls(process, pump)

    async def ended(self) -> int:
        """Wait for its end and return the exit code."""
        return await self._process.wait()

    async def stop(self) -> None:
        await _end(self._process)
        await self._pump.all()


async def _first_word(control: int) -> bytes:
    """Read what workerd says first on its control pipe, that it listens; nothing if it ends. Closes the pipe."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(control, "rb", 0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it: asked to end, it would wait for streams that still run."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
