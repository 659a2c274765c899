"""A gRPC server's address for TLS and for plain text, for the upgrade from release 0.2.

gRPC takes one of the two on a port, and the others know a process by one address. So the address is a relay's:

    a connection  -- first byte 0x16 -->  tls    \
                                                         one gRPC server, in a folder that only this user can open
                  -- another byte   -->  plain  /

Both directions pass bytes on as they come; a side that does not read stops the other one. At the time of
`--plaintext-until` the plain connections are closed, and no more are accepted. The connections over TLS go on.

The server sees connections of Unix sockets. Each of them has a name from which `true_peer` tells the real peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from tandem_runtime import paths
from tandem_runtime.certificates.plaintext import TLS_HANDSHAKE, Plaintext
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

FIRST_BYTE_SECONDS = 10.0
"""Seconds in which a connection must send its first byte."""

MAX_SILENT = 64
"""Connections of one address that have not sent a byte; more are closed."""

_BUFFER_BYTES = 256 * 1024
"""Bytes that may wait for a slow side before the other side is read no more."""

_BACKLOG = 1024
_PREFIX = "tandem-relay/"
_MAX_LOGGED = 1024


class SharedPort:
    """Accepts connections at an address, and passes them to the gRPC server behind. On one event loop."""

    def __init__(self, plaintext: Plaintext) -> None:
        self._plaintext = plaintext
        self._folder = Path(tempfile.mkdtemp(prefix="port-", dir=paths.runtime_dir()))  # mode 0700
        self._servers: list[asyncio.Server] = []
        self._relays: set[_Relay] = set()
        self._silent: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._tasks = TaskSet()
        self._end: asyncio.TimerHandle | None = None

    @property
    def tls_path(self) -> Path:
        """Where the gRPC server listens for TLS."""
        return self._folder / "tls"

    @property
    def plain_path(self) -> Path:
        """Where the gRPC server listens for plain text."""
        return self._folder / "plain"

    @property
    def num_plain(self) -> int:
        """Connections in plain text."""
        return sum(relay.is_plain for relay in self._relays)

    async def listen(self, host: str, port: int) -> int:
        """Accept connections at each address of `host`; return the port. The gRPC server has started.

        Raises InvalidRequest where it cannot.
        """
        loop = asyncio.get_running_loop()
        try:
            for sock in await asyncio.to_thread(_listening, host.strip("[]"), port):
                self._servers.append(await loop.create_server(lambda: _Relay(self), sock=sock, backlog=_BACKLOG))
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {host}:{port}: {error}; is the port taken? port 0 takes a free one"
            ) from error
        self._accepting()
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Accept connections of this user at a Unix socket. Raises InvalidRequest where it cannot."""
        loop = asyncio.get_running_loop()
        try:
            self._servers.append(await loop.create_unix_server(lambda: _Relay(self), path, backlog=_BACKLOG))
            await asyncio.to_thread(Path(path).chmod, 0o600)
        except OSError as error:
            raise InvalidRequest(f"cannot listen on unix:{path}: {error}") from error
        self._accepting()

    def stop_accepting(self) -> None:
        """Take no more connections; those that are open go on."""
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """Close everything. The gRPC server has stopped."""
        self.stop_accepting()
        if self._end is not None:
            self._end.cancel()
        for relay in list(self._relays):
            relay.close()
        await self._tasks.cancel()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _accepting(self) -> None:
        log.warning("plaintext_accepted", until=int(self._plaintext.until))
        self._await_end()

    def _await_end(self) -> None:
        if self._plaintext.is_allowed:  # by the wall clock, which may have been set
            delay = min(max(self._plaintext.remaining_seconds, 0.05), _MAX_TIMER_SECONDS)
            self._end = asyncio.get_running_loop().call_later(delay, self._await_end)
            return
        log.info("plaintext_ended", num_closed=self.num_plain)
        for relay in [relay for relay in self._relays if relay.is_plain]:
            relay.close()

    # -------------------------------------------------------------------------------------- called by the relays

    def opened(self, relay: _Relay) -> bool:
        """Return whether a new connection may stay."""
        self._relays.add(relay)
        self._silent[relay.host] += 1
        may_stay = self._silent[relay.host] <= MAX_SILENT
        if not may_stay and self._is_first("silent", relay):
            log.warning("connections_silent", peer=relay.peer, limit=MAX_SILENT)
        return may_stay

    def spoke(self, relay: _Relay) -> None:
        """The connection has sent its first byte, or has ended before."""
        self._silent[relay.host] -= 1
        if not self._silent[relay.host]:
            del self._silent[relay.host]

    def ended(self, relay: _Relay) -> None:
        self._relays.discard(relay)

    def path_for(self, relay: _Relay) -> Path | None:
        """Return the socket for a connection that has sent its first byte; None: close it."""
        if not relay.is_plain:
            return self.tls_path
        if not self._plaintext.is_allowed:
            if self._is_first("refused", relay):
                log.warning("plaintext_refused", peer=relay.peer)
            return None
        if self._is_first("plain", relay):
            log.warning("plaintext_client", peer=relay.peer)
        return self.plain_path

    def connect(self, relay: _Relay, path: Path) -> None:
        """Connect a connection to the gRPC server, at `path`."""
        self._tasks.spawn(self._connect(relay, path))

    async def _connect(self, relay: _Relay, path: Path) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.bind(f"\0{_PREFIX}{secrets.token_hex(8)}/{relay.peer}".encode())  # true_peer reads it
            await loop.sock_connect(sock, str(path))
            await loop.create_unix_connection(lambda: _Server(relay), sock=sock)
        except OSError as error:
            log.warning("connection_not_relayed", peer=relay.peer, reason=str(error))
            sock.close()
            relay.close()
        except BaseException:
            sock.close()
            raise

    def _is_first(self, what: str, relay: _Relay) -> bool:
        """Return whether to log `what`: once for each address, so that one which connects for ever fills no disk."""
        key = f"{what} {relay.host}"
        if key in self._logged:
            return False
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(key)
        return True


_MAX_TIMER_SECONDS = 60.0


class _Side(asyncio.Protocol):
    """One end of a relayed connection; `other` is the transport of the other end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def eof_received(self) -> bool:
        """Pass the end on. gRPC closes a connection of which one direction has ended, so both end soon."""
        if self.other is not None and self.other.can_write_eof():
            self.other.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()  # after what waits to be written


class _Relay(_Side):
    """The side of the peer: waits for the first byte, and then for the connection to the gRPC server."""

    def __init__(self, port: SharedPort) -> None:
        super().__init__()
        self._port = port
        self._first = b""
        self._is_lost = False
        self._silence: asyncio.TimerHandle | None = None
        self.peer = "unix"
        """As gRPC names peers: `ipv4:10.1.2.3:4567`, `ipv6:[::1]:4567`, `unix`."""
        self.host = "unix"
        self.is_plain = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.host, self.peer = _peer_of(transport.get_extra_info("peername"))
        self._silence = asyncio.get_running_loop().call_later(FIRST_BYTE_SECONDS, self.transport.abort)
        if not self._port.opened(self):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)
            return
        assert self.transport is not None
        self.transport.pause_reading()  # until the server's side is there
        self._first = data
        self._has_spoken()
        self.is_plain = data[0] != TLS_HANDSHAKE
        path = self._port.path_for(self)
        if path is None:
            self.transport.abort()
        else:
            self._port.connect(self, path)

    def connected(self, server: asyncio.Transport) -> None:
        """The gRPC server has the connection."""
        assert self.transport is not None
        if self._is_lost:
            server.close()
            return
        self.other = server
        server.write(self._first)
        self._first = b""
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._has_spoken()
        self._port.ended(self)
        super().connection_lost(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _has_spoken(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
            self._port.spoke(self)


class _Server(_Side):
    """The side of the gRPC server."""

    def __init__(self, relay: _Relay) -> None:
        super().__init__()
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.other = self._relay.transport
        self._relay.connected(self.transport)


def true_peer(peer: str) -> str:
    """Return the peer behind a relayed connection, as gRPC would name it; any other peer as it is."""
    kind, _, name = unquote(peer).partition(":")
    if kind != "unix-abstract" or not name.startswith(_PREFIX):
        return peer
    return name.removeprefix(_PREFIX).partition("/")[2]


def _peer_of(peername: Any) -> tuple[str, str]:
    """Return the host and gRPC's name of a TCP peer."""
    host, port = str(peername[0]), peername[1]
    if ":" in host:
        return host, f"ipv6:[{host}]:{port}"
    return host, f"ipv4:{host}:{port}"


def _listening(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of `host` that this machine has, all with one port. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as opened:
        listening: list[socket.socket] = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sock = socket.create_server(
                    (str(address[0]), listening[0].getsockname()[1] if listening else port),
                    family=family,
                    backlog=_BACKLOG,
                    dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6(),
                )
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or (family, address) == (found[-1][0], found[-1][4]):
                    raise  # a name may have an IPv6 address where IPv6 is off
                continue
            listening.append(opened.enter_context(sock))
        opened.pop_all()
    return listening
