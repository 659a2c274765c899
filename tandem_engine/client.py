"""How does a worker's front start its engine process, talk to it, and learn of its death?

No torch here: the engine is a subprocess, `python -m tandem_engine.process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tandem_engine.channel import AsyncChannel, ChannelClosed, Received
from tandem_engine.messages import Command, EngineFailed, Shutdown
from tandem_engine.settings import EngineConfig

_KEPT_STDERR_CHARACTERS = 3000
_EXIT_SECONDS = 5.0


class EngineClient:
    """One engine process. Made by `start`; ended by `stop`, which may be called more than once."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel) -> None:
        self._process = process
        self._channel = channel
        self._last_words = ""
        self._stderr_task = asyncio.create_task(self._forward_stderr())
        self._is_stopping = False

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineClient:
        """Start the process and send it `config`; LoadProgress and Ready (or EngineFailed) follow as events."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the caller's folder may hold another package called engine
                "-m",
                "tandem_engine.process",
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(config),
            )
        client = cls(process, AsyncChannel(ours))
        client._channel.send(config)
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def send(self, command: Command, fd: int | None = None) -> None:
        """Send a command, with a descriptor that stays the caller's. Raises ChannelClosed if the engine is gone."""
        self._channel.send(command, () if fd is None else (fd,))

    async def events(self) -> AsyncIterator[Received]:
        """Yield (event, descriptors) until the engine ends; the descriptors are the caller's to close.

        An engine that dies yields EngineFailed last; one that was stopped just ends. Meant for one reader.
        """
        while True:
            try:
                received = await self._channel.receive()
            except ChannelClosed:
                break
            yield received
            if isinstance(received.message, EngineFailed):
                return
        if not self._is_stopping:
            yield Received(EngineFailed(await self._obituary()), ())

    async def stop(self) -> None:
        """End the process: politely, then with SIGKILL, and close the channel."""
        self._is_stopping = True
        try:
            await asyncio.wait_for(self._say_goodbye(), _EXIT_SECONDS)
        except TimeoutError:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        finally:
            self._channel.close()
        await self._stderr_task

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(ChannelClosed):  # it is gone already; what is left is to collect its exit code
            self._channel.send(Shutdown())
        await self._process.wait()

    async def _obituary(self) -> str:
        code = await self._process.wait()
        await self._stderr_task
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        last_words = self._last_words.strip() or "nothing"
        return f"the engine process (pid {self.pid}) {how}; its last words on stderr: {last_words}"

    async def _forward_stderr(self) -> None:
        assert self._process.stderr is not None, "the process was started with a pipe"
        while data := await self._process.stderr.read(4096):  # not by line: progress bars end theirs with \r
            text = data.decode(errors="replace")
            self._last_words = (self._last_words + text)[-_KEPT_STDERR_CHARACTERS:]
            sys.stderr.write(text)
            sys.stderr.flush()


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the child's variables: this very package importable, OpenMP held to its threads from the start.

    Torch is asked for huge pages: the first pass over weights that have lain idle costs half as much more then
    (measured: `python -m benchmarks.handover`, its gap).
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, **ours}
    if config.num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(config.num_threads), "MKL_NUM_THREADS": str(config.num_threads)}
    return environment
