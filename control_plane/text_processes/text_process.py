"""The gateway's side of one text process, and the watch over the job that it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from control_plane.generation import ModelFacts
from control_plane.text_processes.tokenizer_load import Generation
from control_plane.text_processes.wire import AsyncChannel, Ended, Hello

_WATCH_SECONDS = 0.05
_MAX_TOLD = 256
"""Names of models that are noted for each process. An older name is asked for again."""


@dataclass(eq=False)
class TextProcess:
    """One text process; written by the pool alone."""

    channel: AsyncChannel
    generation: Generation
    pid: int = 0
    process: psutil.Process | None = None
    cpu_seconds: float = 0.0
    """Before the current job."""
    data_bytes: int = 0
    """Before its first job."""
    has_job: bool = False
    awaits_model: bool = False
    told: dict[str, ModelFacts] = field(default_factory=dict)
    """By a caller's name for a model: what the process was told last."""
    is_over: bool = False
    killed_for: str = ""

    async def begin(self) -> None:
        """Wait until the process runs. Raise Ended."""
        hello = await self.channel.receive()
        assert isinstance(hello, Hello), "a text process begins with Hello"
        self.pid = hello.pid
        try:
            self.process = psutil.Process(hello.pid)
        except psutil.NoSuchProcess as error:
            raise Ended from error
        self.data_bytes = self.now()[1]

    def now(self) -> tuple[float, int]:
        """Return processor seconds since the start, and bytes of private memory."""
        assert self.process is not None, "the process has begun"
        try:
            times, memory = self.process.cpu_times(), self.process.memory_info()
        except psutil.Error as error:
            raise Ended from error
        return times.user + times.system, getattr(memory, "data", memory.rss)

    def tell(self, name: str, model: ModelFacts) -> None:
        """Note what the process is told about a name."""
        self.told.pop(name, None)
        self.told[name] = model
        if len(self.told) > _MAX_TOLD:
            del self.told[next(iter(self.told))]

    def kill(self, reason: str) -> None:
        self.killed_for = self.killed_for or reason
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself, which its connection shows
                self.process.kill()  # checks that the id was not given to another process meanwhile

    @property
    def may_serve(self) -> bool:
        return not self.is_over and self.generation.is_current

    @property
    def is_usable(self) -> bool:
        return self.may_serve and not self.channel.has_ended


@dataclass
class JobWatch:
    """Looks at a running job every 50 ms."""

    process: TextProcess
    max_cpu_seconds: float
    on_kill: Callable[[TextProcess, str, float, int], None]
    memory_bytes: int = 0
    """Of the job, when it was last looked at."""
    _timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_WATCH_SECONDS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        try:
            cpu_seconds, data_bytes = self.process.now()
        except Ended:
            return  # its connection tells
        self.memory_bytes = data_bytes - self.process.data_bytes
        used = cpu_seconds - self.process.cpu_seconds
        if used > self.max_cpu_seconds:
            self.on_kill(self.process, "cpu", used, self.memory_bytes)
        else:
            self.start()
