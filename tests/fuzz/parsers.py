"""The byte parsers that fuzzing feeds, each with its seeds and the laws that hold for every input.

A parser may refuse an input with its own typed error. Any other exception, an accepted forgery, a lost descriptor or a
missed time limit is a finding.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk.segment import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    RecordHeader,
    Segment,
    pack_header,
    record_bytes,
    unpack_header,
)
from kv_transfer_svc.region_table import RegionTable
from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.data_server import _next_request
from kv_transfer_svc.transport.handshake import DataTokens, LinkHandshake, link_request
from kv_transfer_svc.transport.tcp_transport import DataConnection
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.channel import InvalidMessage, _Frames, encode
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.mac import sign_handle, verify_handle
from tandem_runtime.kv.packets import MAX_PACKET_BYTES, PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import _fetch
from tandem_runtime.kv.shared_region import SharedRegion
from tests.fuzz.kv_calls import feed_kv_calls, kv_call_seeds

KEY = b"a handle key of the fuzzing tests"


@dataclass(frozen=True)
class Parser:
    """`feed` raises for a finding, and only for a finding."""

    name: str
    feed: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


# ----------------------------------------------------------------------------------------------------- data connections


def _minted() -> tuple[DataTokens, kv.DataRequest]:
    """Return the tokens of one service and the only request that it may accept; the same in every process."""
    tokens = DataTokens("holder-1", lambda: 1_000_000.0)
    tokens._key = bytes(32)
    request = kv.DataRequest(incarnation="holder-1", token=tokens.new(), probe=kv.ProbeRequest(num_bytes=9))
    return tokens, request


def feed_link_requests(data: bytes) -> None:
    """A holder reads requests: it accepts the minted token only, and ends at the first invalid frame."""
    tokens, minted = _minted()

    async def serve(sock: socket.socket) -> None:
        while (request := await _next_request(sock, 5.0)) is not None:
            try:
                tokens.verify(request)
            except TandemError:
                continue
            assert request.token == minted.token, f"the forged token {request.token!r} was accepted"
            assert request.incarnation == minted.incarnation

    with _sent(data) as sock, suppress(TandemError, OSError):
        sock.setblocking(False)
        _loop().run_until_complete(serve(sock))


def link_request_seeds() -> Sequence[bytes]:
    _, minted = _minted()
    stale = kv.DataRequest(incarnation="another", token=bytes(24), slab=kv.ReadRequest(slab_index=3))
    return [frames.packed(minted), frames.packed(stale) + frames.packed(minted), frames.packed(minted)[:11], b"TKV\x01"]


def feed_link_replies(data: bytes) -> None:
    """A reader reads a reply into three blocks: what it returns are the checksums of what the blocks have."""
    blocks = [memoryview(bytearray(size)) for size in (16, 32, 8)]
    with _sent(data) as sock:
        connection = DataConnection(sock, "peer")
        try:
            checksums = connection.exchange(_minted()[1], blocks)
        except TandemError:
            return
    assert checksums == [block_checksum(bytes(block)) for block in blocks[: len(checksums)]]


def link_reply_seeds() -> Sequence[bytes]:
    content = [bytes([index]) * size for index, size in enumerate((16, 32, 8))]
    trailer = kv.DataTrailer(checksums=[block_checksum(block) for block in content])
    good = frames.packed(kv.DataReply(num_bytes=56)) + b"".join(content) + frames.packed(trailer)
    refusal = pb.ErrorDetail(code=pb.ERROR_CODE_KV_NOT_FOUND, message="gone", field="handle")
    late = frames.packed(kv.DataReply(num_bytes=16)) + content[0] + frames.packed(kv.DataTrailer(error=refusal))
    return [good, frames.packed(kv.DataReply(error=refusal)), late, frames.packed(kv.DataReply(num_bytes=17))]


def feed_links(data: bytes) -> None:
    """A holder answers OpenLink for the service that signed the request, and for no other."""
    handshake = LinkHandshake("holder-1", lambda: KEY, lambda: 1_000_000.0)
    handshake.address = "10.0.0.2:8650"
    signed = link_request("reader-1", handshake.address, KEY)
    try:
        request = kv.OpenLinkRequest.FromString(data)
        handshake.answer(request)
    except (DecodeError, TandemError):
        return
    assert (request.incarnation, request.holder_address, request.mac) == (
        signed.incarnation,
        signed.holder_address,
        signed.mac,
    ), f"a link was opened by the forgery {request}"


def link_seeds() -> Sequence[bytes]:
    signed = link_request("reader-1", "10.0.0.2:8650", KEY)
    replayed = link_request("reader-1", "10.0.0.3:8650", KEY)
    return [signed.SerializeToString(), replayed.SerializeToString()]


# ----------------------------------------------------------------------------------------------------- engine socket


def feed_engine_socket(data: bytes) -> None:
    """Bytes become messages or InvalidMessage; a message survives a round trip; the pieces do not matter."""
    if not data:
        return
    cut, stream = data[0], data[1:]
    whole, pieces = _Frames(), _Frames()
    whole.feed(stream, ())
    first = _pop_all(whole)
    pieces.feed(stream[:cut], ())
    second = _pop_all(pieces)
    if second is not None:
        pieces.feed(stream[cut:], ())
        rest = _pop_all(pieces)
        second = None if rest is None else second + rest
    if first is not None and second is not None:
        # Compared as bytes: NaN differs from itself.
        assert [encode(message) for message in first] == [encode(message) for message in second]


def _pop_all(stream: _Frames) -> list[object] | None:
    try:
        return [received.message for received in stream.pop_all()]
    except InvalidMessage:
        return None


def engine_socket_seeds() -> Sequence[bytes]:
    sampling = SamplingParams(max_tokens=3)
    some = [
        messages.AddRequest("request-1", [1, 2, 3], 3, sampling, block_hashes=["00"], choice_seeds=[7]),
        messages.StartDecode("request-1", [9]),
        messages.AbortRequest("request-1"),
        messages.MapRegion("region-1", 8192, 2, 4096),
        messages.LoadProgress("reading 310 MB of weights", 0.5),
        messages.Shutdown(),
    ]
    framed = [struct.pack("<II", len(encode(each)), 0) + encode(each) for each in some]
    nested = {"type": "Shutdown", "x": []}
    deep = msgspec.msgpack.encode(nested)
    return [b"\x05" + b"".join(framed), *(b"\xff" + each for each in framed), b"\x01" + _frame(deep)]


def _frame(content: bytes) -> bytes:
    return struct.pack("<II", len(content), 0) + content


# ----------------------------------------------------------------------------------------------------- region packets

_REGION_BYTES = 8192


def feed_region_packets(data: bytes) -> None:
    """A KV service answers packets with optional descriptors: every packet is answered or ends the connection.

    | kind of descriptor: 1 byte | length: 2 bytes, little-endian | packet | ...
    """
    regions = RegionTable(lambda offer: None)
    _loop()  # has descriptors of its own
    num_open = _num_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    try:
        for kind, packet in _packets(data):
            _send_packet(theirs, packet, kind)
        theirs.shutdown(socket.SHUT_WR)
        server = RegionServer(Path("unused"), regions)
        _loop().run_until_complete(server._serve(PacketSocket(ours)))
        assert len(regions) == 0, "a region outlived the connection that lent it"
    finally:
        ours.close()
        theirs.close()
        regions.close()
    assert _num_descriptors() == num_open, "a descriptor was lost"


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """At most eight, so that they fit into the socket's buffer."""
    for _ in range(8):
        if len(data) < 4:
            return
        kind, length = data[0], int.from_bytes(data[1:3], "little") % (MAX_PACKET_BYTES + 64)
        yield kind, data[3 : 3 + length]
        data = data[3 + length :]


def _send_packet(sock: socket.socket, packet: bytes, kind: int) -> None:
    """Send `packet` with no descriptor, a memfd, an empty memfd or the end of a pipe."""
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
                socket.send_fds(sock, [packet], fds[:1])
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
    _loop()  # has descriptors of its own
    num_open = _num_descriptors()
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
            _loop().run_until_complete(fetch())
    finally:
        ours.close()
        theirs.close()
    assert _num_descriptors() == num_open, "a descriptor was lost"


def region_answer_seeds() -> Sequence[bytes]:
    grant = b'{"ok":true,"num_bytes":12288,"num_slots":2,"generations_offset":8192}'
    refusal = b'{"error":{"code":15,"message":"no region r","field":"region_id"}}'
    return [_region(kind, packet) for kind in range(4) for packet in (grant, refusal)] + [_region(0, b'{"error":7}')]


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ------------------------------------------------------------------------------------------------------ disk records


def feed_disk_records(data: bytes) -> None:
    """A file becomes records that lie in it, one after another; each is read as the scan found it.

    The first byte decides whether the checksums of all headers are made right first: random bytes never are.
    """
    content = bytearray(data[1:])
    if data[:1] > b"\x7f":
        for start in range(0, len(content) - HEADER_BYTES + 1, ALIGNMENT_BYTES):
            end = start + HEADER_BYTES - 8
            content[end : end + 8] = block_checksum(bytes(content[start:end])).to_bytes(8, "little")
    with tempfile.TemporaryDirectory() as folder:
        segment = Segment(Path(folder), 7, len(content))
        segment.path.write_bytes(content)
        found = segment.scan()
        reached = 0
        for header in found.headers:
            assert header.offset >= reached and header.segment == 7
            reached = header.offset + header.record_bytes
            payload = memoryview(bytearray(header.payload_bytes))
            assert segment.read(header.offset, payload) == header
        assert reached == found.end <= len(content)
        segment.cut(found.end)
        assert segment.scan().headers == found.headers


def disk_record_seeds() -> Sequence[bytes]:
    key = BlockKey(b"d" * 16, 1, b"h" * 16)
    records = b""
    for size in (0, 300, 512):
        payload = bytes([size % 251]) * size
        header = RecordHeader(key, 7, len(records), size, block_checksum(payload))
        records += (pack_header(header) + payload).ljust(record_bytes(size), b"\0")
    torn = records[:-100]
    stale = bytearray(records)
    stale[520] ^= 1
    assert unpack_header(records[:HEADER_BYTES], 7, 0) is not None
    return [bytes([first]) + content for first in (0, 255) for content in (records, torn, bytes(stale))]


# ----------------------------------------------------------------------------------------------------------- handles


def a_handle() -> pb.KvHandle:
    """Return the only handle that was minted."""
    handle = pb.KvHandle(
        handle_id=b"0123456789abcdef",
        request_id="request-1",
        attempt=1,
        prefill_incarnation="prefill-1",
        holder_address="127.0.0.1:8650",
        num_tokens=64,
        num_readers=1,
        deadline_unix_ms=4_000_000_000_000,
    )
    return sign_handle(handle, KEY)


def feed_handles(data: bytes) -> None:
    """Only the minted handle passes, however its bytes are written."""
    try:
        handle = pb.KvHandle.FromString(data)
        verify_handle(handle, KEY)
    except (DecodeError, TandemError):
        return
    assert handle == a_handle(), f"the forgery {handle} was accepted"


def handle_seeds() -> Sequence[bytes]:
    handle = a_handle()
    minted = handle.SerializeToString()
    handle.num_readers = 2
    return [minted, handle.SerializeToString(), minted + b"\x50\x01", minted[:-18]]


# ----------------------------------------------------------------------------------------------------------- helpers

_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of this process: a new one for each input would cost more than the parser."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


@contextmanager
def _sent(data: bytes) -> Iterator[socket.socket]:
    """Yield a socket whose other end has sent `data` and then ended its side."""
    ours, theirs = socket.socketpair()
    try:
        theirs.setblocking(False)
        with suppress(BlockingIOError):  # more than the buffer takes: the parser sees the beginning
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours
    finally:
        ours.close()
        theirs.close()


PARSERS = {
    parser.name: parser
    for parser in (
        Parser("link_requests", feed_link_requests, link_request_seeds),
        Parser("link_replies", feed_link_replies, link_reply_seeds),
        Parser("links", feed_links, link_seeds),
        Parser("engine_socket", feed_engine_socket, engine_socket_seeds),
        Parser("region_packets", feed_region_packets, region_packet_seeds),
        Parser("region_answers", feed_region_answers, region_answer_seeds),
        Parser("disk_records", feed_disk_records, disk_record_seeds),
        Parser("handles", feed_handles, handle_seeds),
        Parser("kv_calls", feed_kv_calls, kv_call_seeds),
    )
}
