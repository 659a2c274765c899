"""A process uses the newest certificate that is fit for it, and keeps the last one otherwise."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import structlog

from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import CertificateFiles, write_certificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import InvalidRequest
from tests.certificates import Authority


def _mixed(one: CertificateFiles, other: CertificateFiles) -> CertificateFiles:
    return CertificateFiles(one.certificate, other.key, one.bundle)


def test_files_of_no_use_are_refused_by_name(tmp_path: Path) -> None:
    authority = Authority()
    identity = authority.identity("decode")
    good = authority.issue(identity)
    for files, reason in [
        (_mixed(good, authority.issue(identity)), "does not belong to the certificate"),
        (authority.issue(identity, dns_names=[identity.dns_name]), identity.role_dns_name),
        (authority.issue(identity, uris=[]), "exactly one"),
        (CertificateFiles(good.certificate, good.key, b"no bundle"), "."),
    ]:
        write_certificate(tmp_path, files)
        with pytest.raises(ValueError, match=reason):
            ProcessCertificate.in_folder(tmp_path)


def test_a_bad_renewal_is_logged_once_and_the_last_certificate_stays(tmp_path: Path) -> None:
    authority = Authority()
    member = authority.member(tmp_path, "decode")
    folder, serial = tmp_path / member.identity.id, member.certificate.current.serial
    with structlog.testing.capture_logs() as logs:
        write_certificate(folder, authority.issue(authority.identity("gateway")))
        assert not member.certificate.refresh() and not member.certificate.refresh()
    assert [entry["event"] for entry in logs] == ["certificate_unusable"]
    assert "this process is decode" in logs[0]["reason"]
    assert member.certificate.current.serial == serial
    assert authority.renew(tmp_path, member) != serial


def test_a_certificate_is_due_at_half_of_its_validity(tmp_path: Path) -> None:
    authority = Authority()
    identity = authority.identity("kv")
    write_certificate(tmp_path, authority.issue(identity, seconds=100.0))
    certificate = ProcessCertificate.in_folder(tmp_path)
    left = certificate.current.expires_at - certificate.renew_at
    assert 48 <= left <= 51


async def test_the_watch_takes_what_somebody_else_renews(tmp_path: Path) -> None:
    authority = Authority()
    identity = authority.identity("prefill")
    paths = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]

    def write(files: CertificateFiles) -> None:
        for path, content in zip(paths, (files.certificate, files.key, files.bundle), strict=True):
            path.write_bytes(content)

    write(authority.issue(identity))
    certificate = ProcessCertificate.from_files(*paths)
    serial = certificate.current.serial
    renewed = asyncio.Event()
    stop = certificate.listen(renewed.set)
    watch = asyncio.create_task(certificate.watch(seconds=0.01))
    write(authority.issue(identity))
    await asyncio.wait_for(renewed.wait(), 5)
    watch.cancel()
    stop()
    assert certificate.current.serial != serial


class _Settings:
    def __init__(self, tls_cert: str = "", tls_key: str = "", tls_ca: str = "") -> None:
        self.tls_cert, self.tls_key, self.tls_ca = tls_cert, tls_key, tls_ca


def test_settings_name_all_three_files_or_none(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.issue(authority.identity("kv"))
    for name, content in (("c", files.certificate), ("k", files.key), ("b", files.bundle)):
        (tmp_path / name).write_bytes(content)
    c, k, b = (str(tmp_path / name) for name in "ckb")
    assert FleetMember.from_settings(_Settings(), "kv") is None
    member = FleetMember.from_settings(_Settings(c, k, b), "kv")
    assert member is not None and member.identity.role == "kv"
    for settings, role, reason in [
        (_Settings(tls_cert=c), "kv", "--tls-key and --tls-ca is not set"),
        (_Settings(c, k, str(tmp_path / "none")), "kv", "No such file"),
        (_Settings(c, b, b), "kv", "cannot be used"),
        (_Settings(c, k, b), "decode", "is of a kv, this process is a decode"),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            FleetMember.from_settings(settings, role)  # type: ignore[arg-type]


async def _handshake(server: FleetMember, client: FleetMember, expect: str) -> ssl.SSLObject:
    """Connect over real sockets; return the server's side, or raise the client's or server's error."""
    accepted: asyncio.Future[ssl.SSLObject] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("ssl_object"))
        writer.write(b"!")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.certificate.ssl_context(server_side=True))
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client.certificate.ssl_context(server_side=False), server_hostname=expect
        )
        try:
            if await reader.read(1) != b"!":
                raise ConnectionError("the server has closed the connection")
            return await accepted
        finally:
            writer.close()


async def test_sockets_verify_both_sides_with_tls_1_3(tmp_path: Path) -> None:
    authority = Authority()
    server, client = authority.member(tmp_path, "kv"), authority.member(tmp_path, "kv")
    seen = await _handshake(server, client, server.identity.dns_name)
    assert seen.version() == "TLSv1.3"
    der = seen.getpeercert(binary_form=True)
    assert server.peers.admit(der).identity == client.identity
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        await _handshake(server, client, client.identity.dns_name)
    stranger = Authority().member(tmp_path, "kv")
    with pytest.raises(ssl.SSLCertVerificationError):
        await _handshake(stranger, client, stranger.identity.dns_name)
    with pytest.raises((ssl.SSLError, ConnectionError)):  # the server refuses it; its own bundle trusts the server
        await _handshake(server, _trusting(tmp_path, stranger, authority), server.identity.dns_name)


def _trusting(tmp_path: Path, member: FleetMember, authority: Authority) -> FleetMember:
    """Return a member whose bundle has `authority`, which has not issued its certificate."""
    files = member.certificate.current.files
    write_certificate(tmp_path / "trusting", CertificateFiles(files.certificate, files.key, authority.bundle))
    return FleetMember(ProcessCertificate.in_folder(tmp_path / "trusting"))
