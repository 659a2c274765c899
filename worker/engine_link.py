"""How do commands reach the engine process in order, from code that must not wait?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from engine.channel import ChannelClosed, Received
from engine.client import EngineClient
from engine.messages import Command
from runtime.log import get_logger

log = get_logger(__name__)


class EngineLink:
    """Queues commands to one engine process and hands out its events; `send` never blocks and never fails.

    A command to an engine that has died is dropped: its death arrives as an event and ends every request anyway.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[tuple[Command, int | None]] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    @property
    def pid(self) -> int:
        return self._client.pid

    def send(self, command: Command, fd: int | None = None) -> None:
        """Queue a command; a descriptor is duplicated and stays the caller's."""
        self._queue.put_nowait((command, None if fd is None else os.dup(fd)))

    def events(self) -> AsyncIterator[Received]:
        """Yield (event, descriptors) until the engine ends. For one reader."""
        return self._client.events()

    async def stop(self) -> None:
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._client.stop()

    async def _write(self) -> None:
        while True:
            command, fd = await self._queue.get()
            try:
                await self._client.send(command, fd)
            except ChannelClosed:
                log.debug("command_to_a_dead_engine_dropped", command=type(command).__name__)
            except Exception:  # one command that cannot be sent must not hold up all that follow
                log.exception("command_not_sent", command=type(command).__name__)
            finally:
                if fd is not None:
                    os.close(fd)
