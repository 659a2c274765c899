"""Tests of the data connection: authentication, and disconnects of either side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.data_server import DataServer
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.tcp_transport import DataConnection
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, StaleIncarnation, Unauthenticated, Unsupported
from tests.kv_transfer_svc.host import until
from tests.kv_transfer_svc.transport.harness import a_request, linked_host


async def test_only_tokens_of_this_life_are_let_in_and_refusals_leave_the_connection_usable(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (host, _):
        connection = await DataConnection.connect(host.service.handshake.tcp_address)
        wrong, stale, old = [await a_request(host) for _ in range(3)]
        wrong.token = bytes(24)
        stale.incarnation = "an earlier life"
        with pytest.raises(Unauthenticated, match="not one of ours") as refused:
            await asyncio.to_thread(connection.exchange, wrong, [])
        assert refused.value.field == "token"
        with pytest.raises(StaleIncarnation, match="an earlier life"):
            await asyncio.to_thread(connection.exchange, stale, [])
        host.put_forward(60.5)
        with pytest.raises(Unauthenticated, match="older than 60 s"):
            await asyncio.to_thread(connection.exchange, old, [])
        right = await a_request(host)
        right.probe.num_bytes = 3
        buffer = bytearray(b"abc")
        assert len(await asyncio.to_thread(connection.exchange, right, [memoryview(buffer)])) == 1
        assert buffer == bytes(3) and connection.is_usable
        connection.close()


async def test_a_half_closed_connection_gets_its_answer_and_is_closed(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (host, data):
        address, _, port = host.service.handshake.tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(address, int(port))
        request = await a_request(host)
        request.probe.num_bytes = 1000
        writer.write(frames.packed(request))
        writer.write_eof()
        answer = await reader.read()  # to the end: the holder disconnects
        assert answer.count(bytes(1000)) == 1
        writer.close()
        await until(lambda: data.num_connections == 0)


async def test_half_a_request_and_nonsense_end_the_connection(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (host, data):
        address, _, port = host.service.handshake.tcp_address.rpartition(":")
        for content in (b"GET / HTTP/1.1\r\n\r\n", frames.packed(await a_request(host))[:20], b"TKV"):
            reader, writer = await asyncio.open_connection(address, int(port))
            writer.write(content)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):  # unread bytes turn the close into a reset
                assert await reader.read() == b""
            writer.close()
        await until(lambda: data.num_connections == 0)


async def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (host, _):
        connection = await DataConnection.connect(host.service.handshake.tcp_address)
        with pytest.raises(Unsupported, match="not None"):
            await asyncio.to_thread(connection.exchange, await a_request(host), [])
        connection.close()


async def test_a_holder_that_sends_more_than_was_asked_for_writes_nowhere(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (host, _):
        connection = await DataConnection.connect(host.service.handshake.tcp_address)
        request = await a_request(host)
        request.probe.num_bytes = 1000
        buffer = bytearray(b"x" * 999)
        with pytest.raises(LinkBroken, match="sends 1000 bytes, of 999"):
            await asyncio.to_thread(connection.exchange, request, [memoryview(buffer)])
        assert buffer == b"x" * 999 and not connection.is_usable
        connection.close()


async def test_a_peer_that_takes_no_connection_is_a_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkBroken, match="took no connection"):
        await DataConnection.connect(f"127.0.0.1:{port}")


async def test_listening_beyond_loopback_must_be_said_aloud() -> None:
    def nobody(request: kv.DataRequest) -> None:
        raise AssertionError

    server = DataServer("0.0.0.0:0", nobody, nobody)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="--insecure"):
        await server.start()
    await server.stop()
