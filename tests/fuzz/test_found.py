"""What fuzzing and reading found: each test failed before its mend."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from pathlib import Path

import pytest

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk.segment import RecordHeader, Segment, pack_header, record_bytes
from kv_transfer_svc.region_table import RegionTable
from kv_transfer_svc.transport.handshake import LinkHandshake, link_request
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.channel import InvalidMessage, _Frames
from tandem_runtime.errors import InvalidRequest, TandemError, Unauthenticated, Unavailable, Unsupported
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.layout import check_memory_kind, check_supported
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import RegionClient, RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.kv.slabs import first_missing_block
from tests.descriptors import OpenFiles
from tests.kv_transfer_svc.layout import KEYS, a_layout

_OFFER = {
    "region_id": "r",
    "incarnation": "w",
    "num_bytes": 4096,
    "num_slots": 1,
    "bytes_per_slot": 8,
    "generations_offset": 8,
}


async def _answer_of(tmp_path: Path, packet: bytes, fd: int | None = None) -> object:
    """Return what a region server answers to one packet; None if it closes the connection."""
    server = RegionServer(tmp_path / "s", RegionTable(lambda offer: None))
    await server.start()
    connection = await PacketSocket.connect(str(tmp_path / "s"))
    try:
        rights = [fd] if fd is not None else []
        socket.send_fds(connection._sock, [packet], rights)
        async with asyncio.timeout(10):
            received = await connection.receive()
        return None if received is None else received[0]
    finally:
        connection.close()
        await server.close()


async def test_a_packet_that_is_nested_thousands_deep_ends_its_connection(tmp_path: Path) -> None:
    """json.loads raises RecursionError, which is no ValueError; the descriptor was lost with it."""
    files = OpenFiles()
    fd = os.memfd_create("test")
    assert await _answer_of(tmp_path, b"[" * 16_000, fd) is None
    os.close(fd)
    assert files.num_more() == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"region_id": []},
        {"region_id": "r" * 257},
        {"incarnation": None},
        {"num_slots": "2"},
        {"num_slots": -1},
        {"num_slots": True},
        {"bytes_per_slot": 1.5},
        {"generations_offset": -8},
        {"generations_offset": 2**63},
        {"more": 1},
    ],
    ids=str,
)
async def test_an_offer_with_a_wrong_field_is_refused_by_name(tmp_path: Path, changes: dict[str, object]) -> None:
    """A list as a region's id could not be hashed, a negative offset read before the region."""
    fd = os.memfd_create("test")
    os.truncate(fd, 4096)
    answer = await _answer_of(tmp_path, json.dumps({"op": "offer", **_OFFER, **changes}).encode(), fd)
    os.close(fd)
    assert isinstance(answer, dict)
    assert answer["error"]["code"] == pb.ERROR_CODE_INVALID_REQUEST
    assert next(iter(changes)) in answer["error"]["message"]


async def test_a_refusal_fits_into_a_packet_however_long_the_question_was(tmp_path: Path) -> None:
    """The refusal repeated 16 KiB of the question, escaped, and broke the bound of a packet."""
    for question in ({"op": "\u2028" * 2500}, {"op": "fetch", "region_id": "\x01" * 2500}):
        answer = await _answer_of(tmp_path, json.dumps(question).encode())
        assert isinstance(answer, dict)
        assert len(json.dumps(answer)) < 1000


def test_a_descriptor_that_cannot_be_mapped_is_refused_and_closed() -> None:
    reading, writing = os.pipe()
    with pytest.raises(InvalidRequest, match=r"no room|cannot be mapped"):
        SharedRegion.map_read_only(reading, 0, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "answer",
    [
        {"ok": True},
        {"ok": True, "num_bytes": 1, "num_slots": "1", "generations_offset": 0},
        {"error": 7},
        {"error": {"code": "x", "message": 1, "field": None}},
    ],
    ids=str,
)
async def test_an_answer_that_is_not_valid_is_unavailable(tmp_path: Path, answer: dict[str, object]) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    listener.setblocking(False)

    async def serve() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        connection = PacketSocket(sock)
        await connection.receive()
        fd = os.memfd_create("test")
        await connection.send(answer, fd)
        os.close(fd)
        connection.close()

    files = OpenFiles()
    serving = asyncio.create_task(serve())
    with pytest.raises(Unavailable, match=r"is not valid|invalid grant"):
        await RegionClient(str(tmp_path / "s")).fetch("r")
    await serving
    assert files.num_more() == 0
    listener.close()


def test_an_offer_is_read_as_it_was_made() -> None:
    offer = RegionOffer("r", "w", 4096, 1, 8, 8)
    assert RegionOffer.parse(json.loads(json.dumps(vars(offer)))) == offer


def test_a_number_without_a_name_in_an_enum_is_unsupported() -> None:
    """Enums of proto3 are open; `Name` raised ValueError, which the caller saw as an internal error."""
    with pytest.raises(Unsupported, match="KV group 0 is kind 99"):
        check_supported(a_layout(kind=99))
    with pytest.raises(Unsupported, match="extent in kind 77"):
        check_memory_kind(pb.Extent(kind=pb.MemoryKind.ValueType(77)))


def test_closing_with_four_thousand_million_blocks_costs_no_memory() -> None:
    """A list with an entry per block was made: 34 GB for this handle."""
    half = kv.Slab(num_blocks=1, num_layers=1)
    assert first_missing_block([half], a_layout(), 16, 0, 2**32 - 1) == 0
    whole = [half, kv.Slab(first_block=1, num_blocks=2**32 - 2, num_layers=2), half]
    assert first_missing_block(whole, a_layout(), 16, 0, 2**32 - 1) is None
    assert first_missing_block([*whole, kv.Slab(num_layers=2)], a_layout(), 16, 0, 2**32) == 2**32 - 1


def test_a_scan_of_many_bad_stretches_reads_the_file_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bad stretch read 256 KiB to find a header 512 bytes later: 32 GB for a segment of 64 MiB."""
    content = b""
    for index in range(512):
        header = RecordHeader(BlockKey(b"d" * 16, 0, index.to_bytes(16, "little")), 7, len(content), 0, 0)
        content += (pack_header(header) if index % 2 == 0 else b"bad").ljust(record_bytes(0), b"\0")
    segment = Segment(tmp_path, 7, len(content))
    segment.path.write_bytes(content)
    num_read, pread = 0, os.pread

    def counted(file: int, num_bytes: int, offset: int) -> bytes:
        nonlocal num_read
        piece = pread(file, num_bytes, offset)
        num_read += len(piece)
        return piece

    monkeypatch.setattr(os, "pread", counted)
    found = segment.scan()
    assert (len(found.headers), found.num_discarded) == (256, 256)
    assert num_read < 10 * len(content)


def test_a_link_is_opened_only_for_the_holder_that_the_request_names() -> None:
    """A holder could repeat a request that it had received to another holder, and got a token for its data."""
    handshake = LinkHandshake("holder-2", lambda: KEYS, lambda: 0.0)
    handshake.address = "10.0.0.2:8650"
    handshake.answer(link_request("reader", "10.0.0.2:8650", KEYS))
    with pytest.raises(Unauthenticated, match=r"a link with 10\.0\.0\.3:8650, this KV service is 10\.0\.0\.2:8650"):
        handshake.answer(link_request("reader", "10.0.0.3:8650", KEYS))


def test_a_signature_does_not_pass_for_other_fields_with_the_same_characters() -> None:
    """The fields are joined by a zero character, which one of them could contain."""
    signed = link_request("a", "b\0c", KEYS)
    moved = kv.OpenLinkRequest(incarnation="a\0b", holder_address="c", link_mac=signed.link_mac)
    with pytest.raises(TandemError):
        LinkHandshake("holder", lambda: KEYS, lambda: 0.0).answer(moved)


@pytest.mark.parametrize(
    "content",
    [
        b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4type\xa8Shutdown",
        b"\x81\xa4type\xa8Shut\xff\xff\xff\xff",
        b"\x83\xa4type\xabStartDecode\xaarequest_id\xa1r\xa9token_ids\xdd\xff\xff\xff\xff",
    ],
    ids=["nested", "no text", "an array of 4,294,967,295"],
)
def test_bytes_that_are_no_message_are_an_invalid_message(content: bytes) -> None:
    stream = _Frames()
    stream.feed(struct.pack("<II", len(content), 0) + content, ())
    with pytest.raises(InvalidMessage):
        stream.pop_all()


def test_a_record_of_no_bytes_is_a_record(tmp_path: Path) -> None:
    header = RecordHeader(BlockKey(b"d" * 16, 0, b"h" * 16), 7, 0, 0, block_checksum(b""))
    segment = Segment(tmp_path, 7, 512)
    segment.path.write_bytes(pack_header(header).ljust(512, b"\0"))
    assert segment.scan().headers == [header]
