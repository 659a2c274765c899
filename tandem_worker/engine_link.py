"""How do commands reach the engine process in order, from code that must not wait?"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tandem_engine.channel import ChannelClosed, Received
from tandem_engine.client import EngineClient
from tandem_engine.messages import Command
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class EngineLink:
    """Sends commands to one engine process and hands out its events; `send` never blocks and never fails.

    A command to an engine that has died is dropped: its death arrives as an event and ends every request anyway.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @property
    def pid(self) -> int:
        return self._client.pid

    def send(self, command: Command, fd: int | None = None) -> None:
        """Send a command, behind those sent before it; a descriptor is duplicated and stays the caller's."""
        try:
            self._client.send(command, fd)
        except ChannelClosed:
            log.debug("command_to_a_dead_engine_dropped", command=type(command).__name__)
        except Exception:  # one command that cannot be sent must not hold up all that follow
            log.exception("command_not_sent", command=type(command).__name__)

    def events(self) -> AsyncIterator[Received]:
        """Yield (event, descriptors) until the engine ends. For one reader."""
        return self._client.events()

    async def stop(self) -> None:
        await self._client.stop()
