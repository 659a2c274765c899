"""An exec probe finds out whether one process serves, with that process's own certificate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.health_check import main
from tandem_runtime.server import GrpcServer
from tests.certificates import Authority


@asynccontextmanager
async def _server(member: FleetMember | None) -> AsyncIterator[tuple[GrpcServer, str]]:
    server = GrpcServer("127.0.0.1:0", lambda _: None, [], member=member)
    try:
        yield server, await server.start()
    finally:
        await server.stop(0)


async def _probe(address: str, *flags: str) -> int:
    return await asyncio.to_thread(main, [address, "--seconds", "3", *flags])


async def test_a_process_is_healthy_once_it_serves_and_alive_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    member = Authority().member(tmp_path, "decode")
    certificate = ("--certificate", str(tmp_path / member.identity.id))
    async with _server(member) as (server, address):
        assert await _probe(address, *certificate) == 1
        assert "it answers, and does not serve" in capsys.readouterr().err
        assert await _probe(address, *certificate, "--alive") == 0
        await server._health.apply(serving=True)
        assert await _probe(address, *certificate) == 0
        assert await _probe(address) == 1  # as Kubernetes' own gRPC probes do: nobody answers
    assert await _probe(address, *certificate, "--alive") == 1


async def test_another_process_at_the_address_is_not_healthy(tmp_path: Path) -> None:
    authority = Authority()
    member, other = authority.member(tmp_path, "decode"), authority.member(tmp_path, "decode")
    async with _server(other) as (_, address):
        assert await _probe(address, "--certificate", str(tmp_path / member.identity.id), "--alive") == 1


async def test_in_plain_text_it_needs_no_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with _server(None) as (_, address):
        assert await _probe(address, "--alive") == 0
        assert await _probe(address, "--alive", "--certificate", str(tmp_path / "none")) == 1
        assert str(tmp_path / "none") in capsys.readouterr().err
