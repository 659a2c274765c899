"""Fixtures for tests of links: KV services with data connections, and a proxy that injects faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kv_transfer_svc.process import link_tls
from kv_transfer_svc.transport.data_server import DataServer, OpenSource
from kv_transfer_svc.transport.link_tls import LinkTls
from kv_transfer_svc.transport.links import Links
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tests.kv_transfer_svc.host import Host, closed, nothing_is_left, running_host, until
from tests.kv_transfer_svc.layout import KEYS, a_layout
from tests.kv_transfer_svc.writer import Writer


@contextlib.asynccontextmanager
async def linked_host(
    folder: Path,
    *,
    host_id: str = "",
    transports: Sequence[str] = ("tcp", "grpc"),
    open_source: OpenSource | None = None,
    tls: LinkTls | None = None,
    member: FleetMember | None = None,
) -> AsyncIterator[tuple[Host, DataServer]]:
    """Run a KV service with a listener for data connections: with `member` all over TLS, with `tls` only those."""
    tls = link_tls(member) if member is not None else tls
    async with running_host(folder, member=member) as host:
        host.service.puller.links = Links(
            host.incarnation,
            lambda: KEYS,
            transports=transports,
            host_id=host_id,
            clock=host.clock,
            counters=host.store.counters,
            member=member,
            tls=tls,
        )
        handshake = host.service.handshake
        handshake.host_id, handshake.kv_socket = host_id, host.socket
        handshake.identity = "" if tls is None else tls.identity.uri
        data = DataServer("127.0.0.1:0", handshake.tokens.verify, open_source or host.service.open_source, tls=tls)
        handshake.tcp_address = await data.start()
        try:
            yield host, data
        finally:
            await data.stop()


async def sealed(
    writer: Writer, slots: Sequence[int], checksums: Sequence[int] = (), seconds: float = 60.0
) -> pb.KvHandle:
    """Return a closed handle of one slab."""
    handle = writer.handle(num_blocks=len(slots), seconds=seconds)
    await writer.client.reserve(handle, writer.region_id, a_layout())
    slab = writer.slab(0, 0, slots)
    slab.checksums.extend(checksums)
    await writer.client.seal(handle, [slab], closed(len(slots)))
    return handle


def link_of(host: Host) -> pb.KvLink:
    """Return the report of the only link of `host`."""
    (link,) = host.service.puller.links.report()
    return link


async def everything_is_back(*hosts: Host) -> None:
    for host in hosts:
        await until(partial(nothing_is_left, host))


async def a_request(host: Host) -> kv.DataRequest:
    """Return a request with a valid token of `host` and without a kind."""
    return kv.DataRequest(incarnation=host.incarnation, token=host.service.handshake.tokens.new())


@dataclass
class TransferFault:
    """A fault on the way to the reader, `after` so many more bytes. Kinds: flip, cut, stall."""

    kind: str
    after: int


class Proxy:
    """Forwards connections to a data server and injects `fault` once."""

    def __init__(self, target: str) -> None:
        self.fault: TransferFault | None = None
        self.seen, self.seen_of_reader = bytearray(), bytearray()
        """What passed on the way to the reader, and on the way from it."""
        self.has_stalled, self.goes_on = asyncio.Event(), asyncio.Event()
        """A fault that stalls lasts until `goes_on`."""
        self.num_connections = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_connections += 1
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        asking = asyncio.create_task(_forward(reader, upstream_writer, self.seen_of_reader))
        try:
            while data := bytearray(await upstream_reader.read(1 << 16)):
                self.seen += data
                if not await self._inject(data, writer):
                    return
                writer.write(data)
                await writer.drain()
        finally:
            asking.cancel()
            upstream_writer.close()
            writer.close()

    async def _inject(self, data: bytearray, writer: asyncio.StreamWriter) -> bool:
        """Inject the fault if it is due. False: the connection is cut."""
        if self.fault is None or self.fault.after >= len(data):
            if self.fault is not None:
                self.fault.after -= len(data)
            return True
        fault, self.fault = self.fault, None
        if fault.kind == "flip":
            data[fault.after] ^= 0x10
            return True
        writer.write(data[: fault.after])
        await writer.drain()
        if fault.kind == "stall":
            self.has_stalled.set()
            await self.goes_on.wait()
            del data[: fault.after]
            return True
        return False


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
    while data := await reader.read(1 << 16):
        seen += data
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@contextlib.asynccontextmanager
async def proxied(host: Host) -> AsyncIterator[Proxy]:
    """Route data connections to `host` through a proxy."""
    proxy = Proxy(host.service.handshake.tcp_address)
    host.service.handshake.tcp_address = await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
