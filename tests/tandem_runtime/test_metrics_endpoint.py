"""Every process answers GET /metrics: in plain text on loopback, over TLS with its own certificate beyond it."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from tandem_runtime.certificates.files import write_certificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import METRICS_NAME
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.metrics_endpoint import MetricsEndpoint, accepts_gzip
from tests.certificates import Authority
from tests.system.fleet import until

PIECES = [b"# TYPE a gauge\na 1\n" * 4_000] * 5
TEXT = b"".join(PIECES)


@asynccontextmanager
async def endpoint(
    listen: str = "127.0.0.1:0", member: FleetMember | None = None, **more: Any
) -> AsyncIterator[MetricsEndpoint]:
    served = MetricsEndpoint(listen, member, **{"read": lambda: PIECES, **more})
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


async def test_the_metrics_are_answered_compressed_where_the_reader_takes_it() -> None:
    async with endpoint() as served, httpx.AsyncClient(base_url=f"http://{served.address}") as http:
        plain = await http.get("/metrics", headers={"accept-encoding": "identity"})
        packed = await http.get("/metrics?x=1", headers={"accept-encoding": "gzip;q=1.0, *;q=0.1"})
        assert (plain.status_code, plain.content) == (200, TEXT)
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (packed.content, packed.headers["content-encoding"]) == (TEXT, "gzip")
        assert int(packed.headers["content-length"]) < len(TEXT) / 20
        head = await http.head("/metrics", headers={"accept-encoding": "identity"})
        assert (head.content, head.headers["content-length"]) == (b"", str(len(TEXT)))


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/metrics/x", 404), ("POST", "/metrics", 405)]
)
async def test_nothing_else_is_answered(method: str, path: str, status: int) -> None:
    async with endpoint() as served, httpx.AsyncClient(base_url=f"http://{served.address}") as http:
        assert (await http.request(method, path)).status_code == status


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP;q=0.5, br", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("*", True),
        ("br", False),
    ],
)
def test_gzip_is_sent_to_those_who_accept_it(accepted: str, expected: bool) -> None:
    assert accepts_gzip(accepted) is expected


async def test_the_reading_is_made_in_a_thread_and_one_at_a_time() -> None:
    threads: set[int] = set()
    num_now = num_most = 0

    def read() -> list[bytes]:
        nonlocal num_now, num_most
        num_now += 1
        num_most = max(num_most, num_now)
        threads.add(threading.get_ident())
        num_now -= 1
        return [b"a 1\n"]

    async with endpoint(read=read) as served, httpx.AsyncClient(base_url=f"http://{served.address}") as http:
        answers = await asyncio.gather(*(http.get("/metrics") for _ in range(8)))
    assert [answer.text for answer in answers] == ["a 1\n"] * 8
    assert threading.get_ident() not in threads and num_most == 1


async def test_a_reading_that_fails_is_answered_so_and_the_next_one_succeeds() -> None:
    failures = [RuntimeError("once")]

    def read() -> list[bytes]:
        if failures:
            raise failures.pop()
        return [b"a 1\n"]

    async with endpoint(read=read) as served, httpx.AsyncClient(base_url=f"http://{served.address}") as http:
        assert (await http.get("/metrics")).status_code == 500
        assert (await http.get("/metrics")).text == "a 1\n"


async def test_a_head_without_end_is_not_read_for_ever() -> None:
    async with endpoint() as served:
        host, _, port = served.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 40_000)
        async with asyncio.timeout(20):
            assert await _until_closed(reader) == b""
        writer.close()


async def test_connections_are_bounded_and_free_again_when_they_end() -> None:
    async with endpoint() as served:
        host, _, port = served.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
        reader, refused = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await _until_closed(reader) == b"", "the 17th is closed"
        refused.close()
        for _, writer in silent:
            writer.close()
        async with httpx.AsyncClient(base_url=f"http://{served.address}") as http, asyncio.timeout(20):
            while True:
                try:
                    assert (await http.get("/metrics")).status_code == 200
                    return
                except httpx.RemoteProtocolError:  # the closed ones were not yet seen
                    continue


async def test_beyond_loopback_the_process_proves_itself_and_shows_a_renewed_certificate_at_once(
    tmp_path: Path,
) -> None:
    authority = Authority()
    member = _member(authority, tmp_path)
    async with endpoint("0.0.0.0:0", member) as served:
        assert served.is_encrypted
        port = int(served.address.rpartition(":")[2])
        status, serial = await _scrape(authority, port)
        assert (status, serial) == (b"HTTP/1.1 200 OK", member.certificate.current.serial)
        renewed = _renew(authority, tmp_path, member)

        async def shows_it() -> bool:
            return (await _scrape(authority, port))[1] == renewed

        await until(shows_it, 20)
        with pytest.raises(ssl.SSLError):
            await _scrape(Authority(), port)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await _scrape(None, port)


async def test_without_a_certificate_a_process_listens_on_loopback_only() -> None:
    with pytest.raises(InvalidRequest, match="beyond loopback and the process has no certificate"):
        async with endpoint("0.0.0.0:0"):
            pass
    async with endpoint("0.0.0.0:0", insecure=True) as served:
        assert not served.is_encrypted


async def test_a_port_in_use_is_named_and_no_address_means_no_endpoint() -> None:
    async with endpoint() as served:
        with pytest.raises(InvalidRequest, match="is the port taken"):
            async with endpoint(served.address):
                pass
    async with endpoint("") as none:
        assert (none.address, none.address_for_others("10.0.0.1:5")) == ("", "")


@pytest.mark.parametrize(
    ("listen", "own", "reported"),
    [
        ("127.0.0.1:0", "127.0.0.1:8650", "127.0.0.1"),
        ("127.0.0.1:0", "10.0.0.7:8650", ""),
        ("0.0.0.0:0", "worker-7:8650", "worker-7"),
        ("0.0.0.0:0", "[fd00::7]:8650", "[fd00::7]"),
        ("127.0.0.1:0", "unix:/run/x", "127.0.0.1"),
    ],
)
async def test_the_address_that_others_get_is_one_that_they_can_reach(listen: str, own: str, reported: str) -> None:
    async with endpoint(listen, insecure=True) as served:
        port = served.address.rpartition(":")[2]
        assert served.address_for_others(own) == (f"{reported}:{port}" if reported else "")


def _member(authority: Authority, folder: Path) -> FleetMember:
    member = authority.member(folder, "decode")
    _renew(authority, folder, member)
    return member


def _renew(authority: Authority, folder: Path, member: FleetMember) -> int:
    """Give the member a certificate as Tandem's own authority makes them; return its serial number."""
    identity = member.identity
    write_certificate(folder / identity.id, authority.issue(identity, dns_names=[*identity.dns_names, METRICS_NAME]))
    assert member.certificate.refresh()
    return member.certificate.current.serial


async def _scrape(authority: Authority | None, port: int) -> tuple[bytes, int]:
    """Return the first line of an answer, and the certificate's number; in plain text without `authority`."""
    context = None
    if authority is not None:
        context = ssl.create_default_context(cadata=authority.bundle.decode())
    name = METRICS_NAME if context is not None else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: metrics\r\nAccept-Encoding: gzip\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert gzip.decompress(await reader.read()) == TEXT
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return head.splitlines()[0], x509.load_der_x509_certificate(shown).serial_number
    finally:
        writer.close()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
