"""Feeds packets and descriptors to both sides of the socket over which workers lend regions to a KV service."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kv_transfer_svc.region_table import RegionTable
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.packets import MAX_PACKET_BYTES, PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import _fetch
from tandem_runtime.kv.shared_region import SharedRegion
from tests.descriptors import OpenFiles
from tests.fuzz.loop import event_loop

_REGION_BYTES = 8192


def feed_region_packets(data: bytes) -> None:
    """A KV service answers packets with optional descriptors: every packet is answered or ends the connection.

    | kind of descriptor: 1 byte | length: 2 bytes, little-endian | packet | ...
    """
    regions = RegionTable(lambda offer: None)
    event_loop()  # has descriptors of its own
    files = OpenFiles()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    try:
        for kind, packet in _packets(data):
            _send_packet(theirs, packet, kind)
        theirs.shutdown(socket.SHUT_WR)
        server = RegionServer(Path("unused"), regions)
        event_loop().run_until_complete(server._serve(PacketSocket(ours)))
        assert len(regions) == 0, "a region outlived the connection that lent it"
    finally:
        ours.close()
        theirs.close()
        regions.close()
    assert files.num_more() == 0, "a descriptor was lost"


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """At most eight, so that they fit into the socket's buffer."""
    for _ in range(8):
        if len(data) < 4:
            return
        kind, length = data[0], int.from_bytes(data[1:3], "little") % (MAX_PACKET_BYTES + 64)
        yield kind, data[3 : 3 + length]
        data = data[3 + length :]


def _send_packet(sock: socket.socket, packet: bytes, kind: int) -> None:
    """Send `packet` with no descriptor, a memfd, an empty memfd or the end of a pipe; from 128 on with two of these."""
    fds: list[int] = []
    if kind % 4 == 1:
        fds = [os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)]
        os.truncate(fds[0], _REGION_BYTES + 4096)
    elif kind % 4 == 2:
        fds = [os.memfd_create("fuzz")]
    elif kind % 4 == 3:
        fds = list(os.pipe())
    try:
        if packet:  # an empty packet is the end of the connection
            with suppress(BlockingIOError):  # the buffer is full: the parser sees those before
                socket.send_fds(sock, [packet], fds[:1] * (2 if kind >= 128 else 1))
    finally:
        for fd in fds:
            os.close(fd)


def region_packet_seeds() -> Sequence[bytes]:
    offer = (
        b'{"op":"offer","region_id":"r","incarnation":"w","num_bytes":8208,"num_slots":2,'
        b'"bytes_per_slot":4096,"generations_offset":8192}'
    )
    fetch = b'{"op":"fetch","region_id":"r"}'
    nested = b"[" * 9000
    return [
        _region(1, offer) + _region(0, fetch),
        _region(129, offer.replace(b"8192}", b'0,"kind":"device"}'))
        + _region(0, fetch.replace(b"}", b',"kind":"device"}')),
        _region(129, offer),
        _region(1, offer.replace(b"}", b',"kind":"device"}')),
        _region(2, offer),
        _region(3, offer) + _region(1, offer) + _region(1, offer),
        _region(0, nested),
        _region(1, offer.replace(b'"r"', b"[]")) + _region(0, fetch),
        _region(1, offer.replace(b"8192}", b"-8}")),
        _region(0, b'{"op":"' + b"\\u2028" * 2000 + b'"}'),
    ]


def _region(kind: int, packet: bytes) -> bytes:
    return bytes([kind]) + len(packet).to_bytes(2, "little") + packet


def feed_region_answers(data: bytes) -> None:
    """A worker reads a service's answer to a fetch: a grant, or a typed error."""
    event_loop()  # has descriptors of its own
    files = OpenFiles()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)

    async def fetch() -> None:
        grant = await _fetch(PacketSocket(ours), "r")
        region = SharedRegion.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
        for slot in range(min(grant.num_slots, 4)):
            region.generation(slot)
        region.close()

    try:
        for kind, packet in list(_packets(data))[:1]:
            _send_packet(theirs, packet, kind)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(TandemError):
            event_loop().run_until_complete(fetch())
    finally:
        ours.close()
        theirs.close()
    assert files.num_more() == 0, "a descriptor was lost"


def region_answer_seeds() -> Sequence[bytes]:
    grant = b'{"ok":true,"num_bytes":12288,"num_slots":2,"generations_offset":8192}'
    refusal = b'{"error":{"code":15,"message":"no region r","field":"region_id"}}'
    kinds = [0, 1, 2, 3, 129]
    return [_region(kind, packet) for kind in kinds for packet in (grant, refusal)] + [_region(0, b'{"error":7}')]
