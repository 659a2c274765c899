"""Our Unix sockets are for our user and root: the kernel says who is at the other end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import RegionClient, RegionGrant, RegionOffer
from tandem_runtime.peer_credentials import PeerCredentials, check_own_user, peer_credentials

OTHER_UID = 54_321

_CONNECT = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
try:
    sock.send(b'{"op":"fetch","region_id":"r"}')
    print(sock.recv(1000))
except OSError as error:
    print("refused:", type(error).__name__)
"""


class NoRegions:
    """A keeper that nobody reaches."""

    def take(self, offer: RegionOffer, fd: int, connection: object, memory_fd: int | None = None) -> None:
        raise AssertionError("a stranger lent a region")

    def owner_gone(self, region_id: str, connection: object) -> None:
        raise AssertionError("a stranger lent a region")

    def grant(self, region_id: str) -> RegionGrant:
        raise AssertionError("a stranger got a region")


def as_uid(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel name another user on every socket."""
    real: Callable[..., Any] = socket.socket.getsockopt

    class Named(socket.socket):
        def getsockopt(self, level: int, name: int, *size: int) -> Any:
            if name != socket.SO_PEERCRED:
                return real(self, level, name, *size)
            return struct.pack("=iII", 4711, uid, uid)

    monkeypatch.setattr(socket, "socket", Named)


def test_the_kernel_names_the_peer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert peer_credentials(ours) == PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
        assert check_own_user(ours, "a socket pair").pid == os.getpid()


@pytest.mark.parametrize(("own", "peer"), [(1000, OTHER_UID), (0, OTHER_UID), (1000, 65_534)])
def test_another_user_is_refused_by_number(own: int, peer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_uid(peer, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: own)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(Unauthenticated) as refused:
        check_own_user(sock, "the socket")
    assert f"process 4711 of user {peer} is at the other end of the socket; only user {own}" in refused.value.message


@pytest.mark.parametrize("peer", [1000, 0])
def test_our_user_and_root_are_accepted(peer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_uid(peer, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with socket.socket(socket.AF_UNIX) as sock:
        assert check_own_user(sock, "the socket").uid == peer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_a_process_of_another_user_gets_no_region() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)  # noqa: PTH101 - a line, not a wait
        server = RegionServer(Path(name, "s"), NoRegions())
        await server.start()
        server.path.chmod(0o666)  # the first lock is open
        with structlog.testing.capture_logs() as lines:
            stranger = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _CONNECT, str(server.path), str(OTHER_UID), stdout=asyncio.subprocess.PIPE
            )
            said, _ = await stranger.communicate()
        await server.close()
    assert said.strip() in (b"b''", b"refused: BrokenPipeError", b"refused: ConnectionResetError")
    (line,) = (line for line in lines if line["event"] == "kv_region_peer_refused")
    assert f"of user {OTHER_UID}" in line["reason"]


async def test_a_worker_lends_nothing_to_a_service_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        connection = await PacketSocket.connect(str(tmp_path / "s"))
        connection.close()
        as_uid(OTHER_UID, monkeypatch)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(Unavailable, match=f"no KV service of ours answers .* of user {OTHER_UID}"):
            await RegionClient(str(tmp_path / "s")).fetch("r")
