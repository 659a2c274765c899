"""The byte parsers that fuzzing feeds, each with its seeds and the laws that hold for every input.

A parser may refuse an input with its own typed error. Any other exception, an accepted forgery, a lost descriptor or a
missed time limit is a finding.
"""

from __future__ import annotations

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
from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.data_server import _next_request
from kv_transfer_svc.transport.handshake import DataTokens, LinkHandshake, link_request
from kv_transfer_svc.transport.tcp_transport import DataConnection
from kv_transfer_svc.transport.wires import PlainWire
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.channel import InvalidMessage, _Frames, encode
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.mac import sign_handle
from tandem_runtime.kv.signatures import HandleSigner, HandleVerifier, signed_bytes
from tests.fuzz.kv_calls import feed_kv_calls, kv_call_seeds
from tests.fuzz.loop import event_loop
from tests.fuzz.regions import (
    feed_region_answers,
    feed_region_packets,
    region_answer_seeds,
    region_packet_seeds,
)

SIGNER = HandleSigner(bytes(range(32)))
KEYS = KvKeys((SIGNER.public_key,), b"the link key of the fuzzing tests")


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
        while (request := await _next_request(PlainWire(sock), 5.0)) is not None:
            try:
                tokens.verify(request)
            except TandemError:
                continue
            assert request.token == minted.token, f"the forged token {request.token!r} was accepted"
            assert request.incarnation == minted.incarnation

    with _sent(data) as sock, suppress(TandemError, OSError):
        sock.setblocking(False)
        event_loop().run_until_complete(serve(sock))


def link_request_seeds() -> Sequence[bytes]:
    _, minted = _minted()
    stale = kv.DataRequest(incarnation="another", token=bytes(24), slab=kv.ReadRequest(slab_index=3))
    return [frames.packed(minted), frames.packed(stale) + frames.packed(minted), frames.packed(minted)[:11], b"TKV\x01"]


def feed_link_replies(data: bytes) -> None:
    """A reader reads a reply into three blocks: what it returns are the checksums of what the blocks have."""
    blocks = [memoryview(bytearray(size)) for size in (16, 32, 8)]
    with _sent(data) as sock:
        connection = DataConnection(PlainWire(sock), "peer")
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
    handshake = LinkHandshake("holder-1", lambda: KEYS, lambda: 1_000_000.0)
    handshake.address = "10.0.0.2:8650"
    signed = link_request("reader-1", handshake.address, KEYS)
    try:
        request = kv.OpenLinkRequest.FromString(data)
        handshake.answer(request)
    except (DecodeError, TandemError):
        return
    assert (request.incarnation, request.holder_address, request.link_mac) == (
        signed.incarnation,
        signed.holder_address,
        signed.link_mac,
    ), f"a link was opened by the forgery {request}"


def link_seeds() -> Sequence[bytes]:
    signed = link_request("reader-1", "10.0.0.2:8650", KEYS)
    replayed = link_request("reader-1", "10.0.0.3:8650", KEYS)
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
    return SIGNER.sign(handle)


_MAC_KEY = b"the MAC key of release 0.2"
_OLD_KEYS = KvKeys(KEYS.public_keys, KEYS.link_key, _MAC_KEY)
_VERIFIERS = (
    HandleVerifier(lambda: KEYS),  # signatures only
    HandleVerifier(lambda: _OLD_KEYS, macs_until=1.0, clock=lambda: 0.0),  # during the upgrade from release 0.2
    HandleVerifier(lambda: _OLD_KEYS, macs_until=1.0, clock=lambda: 1.0),  # and after it
)


def an_old_handle() -> pb.KvHandle:
    """Return the minted handle as a gateway of release 0.2 makes it: with a MAC, without a signature."""
    handle = a_handle()
    handle.ClearField("signature")
    return sign_handle(handle, _MAC_KEY)


def feed_handles(data: bytes) -> None:
    """Only the minted handle passes, however its bytes are written; the old one while an upgrade lasts."""
    try:
        handle = pb.KvHandle.FromString(data)
    except DecodeError:
        return
    for number, verifier in enumerate(_VERIFIERS):
        try:
            verifier.verify(handle)
        except TandemError:
            continue
        assert signed_bytes(handle, b"") == signed_bytes(a_handle(), b""), f"the forgery {handle} was accepted"
        is_signed = handle.signature == a_handle().signature
        assert is_signed or (number == 1 and handle.mac == an_old_handle().mac), f"{handle} was accepted by {number}"


def handle_seeds() -> Sequence[bytes]:
    handle, old = a_handle(), an_old_handle()
    minted, both = handle.SerializeToString(), sign_handle(handle, _MAC_KEY)
    other_key = HandleSigner(bytes(32)).sign(handle)
    handle.num_readers = 2
    some = [minted, handle.SerializeToString(), minted + b"\x50\x01", minted[:-18], old.SerializeToString()]
    return [*some, both.SerializeToString(), other_key.SerializeToString()]


# ----------------------------------------------------------------------------------------------------------- helpers


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
