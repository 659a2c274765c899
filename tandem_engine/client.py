"""Starts an engine process, exchanges messages with it, and reports its death.

This module does not import torch: the engine is a subprocess, `python -m tandem_engine.process` or another `Program`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.channel import AsyncChannel, ChannelClosed, Received
from tandem_engine.encoder.messages import EncoderCommand
from tandem_engine.messages import Command, EngineFailed, Shutdown
from tandem_engine.settings import EngineConfig
from tandem_machine.limits import with_remedy
from tandem_machine.memory import num_oom_kills

_KEPT_STDERR_CHARACTERS = 3000
_EXIT_SECONDS = 5.0


@dataclass(frozen=True)
class Program:
    """An engine's program, which gets `--fd N` besides `command`."""

    command: tuple[str, ...]
    python_path: str
    """For PYTHONPATH."""

    @classmethod
    def own(cls) -> Program:
        """Return Tandem's own engine, in this interpreter."""
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: the current folder may hold a package of the same name
        return cls((sys.executable, "-P", "-m", "tandem_engine.process"), os.pathsep.join(paths))


class EngineClient:
    """One engine process. `start` creates it; `stop` ends it and may be called more than once."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel) -> None:
        self._process = process
        self._channel = channel
        self._stderr_tail = ""
        self._stderr_task = asyncio.create_task(self._forward_stderr())
        self._is_stopping = False
        self._num_oom_kills = num_oom_kills()

    @classmethod
    async def start(cls, config: EngineConfig, program: Program | None = None) -> EngineClient:
        """Start the process and send it `config`; LoadProgress and Ready (or EngineFailed) follow as events.

        Without `program`: Tandem's own engine.
        """
        program = program or Program.own()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *program.command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(config, program),
            )
        client = cls(process, AsyncChannel(ours))
        client._channel.send(config)
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while the process runs; negative: the signal that ended it."""
        return self._process.returncode

    def send(self, command: Command | EncoderCommand, *fds: int) -> None:
        """Send a command; the caller keeps the descriptors. Raises ChannelClosed if the engine is gone."""
        self._channel.send(command, fds)

    async def events(self) -> AsyncIterator[Received]:
        """Yield (event, descriptors) until the engine ends; the caller closes the descriptors.

        The last event of an engine that dies is EngineFailed; a stopped engine has none. Only one reader may iterate.
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
            yield Received(EngineFailed(await self._describe_death()), ())

    async def stop(self) -> None:
        """End the process with Shutdown, after a timeout with SIGKILL, and close the channel."""
        self._is_stopping = True
        try:
            await asyncio.wait_for(self._shut_down(), _EXIT_SECONDS)
        except TimeoutError:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        finally:
            self._channel.close()
        await self._stderr_task

    async def _shut_down(self) -> None:
        with contextlib.suppress(ChannelClosed):  # the process is gone already; wait() collects its exit code
            self._channel.send(Shutdown())
        await self._process.wait()

    async def _describe_death(self) -> str:
        code = await self._process.wait()
        await self._stderr_task
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGKILL:
            how += _memory_verdict(self._num_oom_kills, num_oom_kills())
        stderr_tail = self._stderr_tail.strip() or "nothing"
        return with_remedy(f"the engine process (pid {self.pid}) {how}; its last output on stderr: {stderr_tail}")

    async def _forward_stderr(self) -> None:
        assert self._process.stderr is not None, "the process was started with a pipe"
        while data := await self._process.stderr.read(4096):  # not by line: progress bars end with \r
            text = data.decode(errors="replace")
            self._stderr_tail = (self._stderr_tail + text)[-_KEPT_STDERR_CHARACTERS:]
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except OSError:  # a full disk: read on, or the engine would stop once its pipe is full
                continue


def _memory_verdict(before: int | None, now: int | None) -> str:
    """Return whether the kernel killed for lack of memory, by its count of such kills; in a sentence's middle."""
    remedy = "give it more memory, or a smaller pool with --kv-memory-bytes"
    if before is None or now is None:
        return f" (out of memory? the kernel does not tell; {remedy})"
    if now > before:
        return f": out of memory, by the kernel's count of such kills (oom_kill {before} before, {now} now); {remedy}"
    return f" (not for memory: the kernel has counted no such kill since, oom_kill is {now})"


def _environment(config: EngineConfig, program: Program) -> dict[str, str]:
    """Return the child's environment: the program is importable, and OpenMP has its thread limit from the start.

    Torch gets huge pages: they halve the extra time of the first pass over weights that were idle (measured:
    `python -m benchmarks.handover`). CUDA counts devices as NVML and nvidia-smi do, by bus, unless CUDA_DEVICE_ORDER
    says otherwise: by itself it counts the fastest first.
    """
    ours = {"PYTHONPATH": program.python_path, "PYTHONUNBUFFERED": "1"}
    environment = {"THP_MEM_ALLOC_ENABLE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, **ours}
    if config.num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(config.num_threads), "MKL_NUM_THREADS": str(config.num_threads)}
    return environment
