"""A simulated Unix socket for the real region client and server.

Replaces tandem_runtime.kv.packets.PacketSocket. The kernel closes the sockets of a killed process; a stopped process
does not answer.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from tandem_runtime.errors import Unavailable
from tests.kv_transfer_svc.simulation.network import Network
from tests.kv_transfer_svc.simulation.virtual_loop import Process, current_process

_SECONDS = 0.0002

Accept = Callable[["SimulatedPackets"], object]


class SocketFolder:
    """The listening processes by path."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._listeners: dict[str, tuple[Process, Accept]] = {}

    def listen(self, path: str, process: Process, accept: Accept) -> None:
        self._listeners[path] = process, accept

    async def connect(self, path: str) -> SimulatedPackets:
        client = current_process()
        assert client is not None, "only simulated processes have sockets"
        process, accept = self._listeners[path]
        if process.is_dead:
            raise Unavailable(f"no KV service answers at {path}: connection refused")
        ours, theirs = SimulatedPackets(self.network, client), SimulatedPackets(self.network, process)
        ours.peer, theirs.peer = theirs, ours
        process.call(accept, theirs)
        await asyncio.sleep(_SECONDS)
        return ours


class SimulatedPackets:
    """One end of a connection."""

    def __init__(self, network: Network, process: Process) -> None:
        self.peer: SimulatedPackets | None = None
        self._network = network
        self._process = process
        self._packets: deque[tuple[dict[str, Any], tuple[int, ...]] | None] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False
        process.on_end.append(self.close)

    async def send(self, message: dict[str, Any], *fds: int) -> None:
        if self.peer is None:
            raise Unavailable("the region socket is closed")
        self._give(self.peer, (dict(message), tuple(map(os.dup, fds))))

    async def receive(self) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        while not self._packets:
            self._arrived.clear()
            await self._arrived.wait()
        return self._packets.popleft() if self._packets[0] is not None else None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        peer, self.peer = self.peer, None
        for packet in self._packets:
            _discard(packet)
        if peer is not None:
            peer.peer = None
            self._give(peer, None)

    def _give(self, peer: SimulatedPackets, packet: tuple[dict[str, Any], tuple[int, ...]] | None) -> None:
        self._network.later(_SECONDS, peer._process.call, peer._take, packet)

    def _take(self, packet: tuple[dict[str, Any], tuple[int, ...]] | None) -> None:
        if self._is_closed:
            _discard(packet)
            return
        self._packets.append(packet)
        self._arrived.set()


def _discard(packet: tuple[dict[str, Any], tuple[int, ...]] | None) -> None:
    for fd in packet[1] if packet is not None else ():
        os.close(fd)
