"""Serves gRPC: certificates, health and the error interceptor around a process's services."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem_runtime.certificates.access import AccessInterceptor
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.interceptors import ErrorInterceptor
from tandem_runtime.message_sizes import LARGEST, SERVICES
from tandem_runtime.shared_port import SharedPort
from tandem_runtime.tasks import TaskSet

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # without it two servers share a port, and each gets half of the calls
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),  # accept our clients' keepalive pings at any rate
]


class GrpcServer:
    """A gRPC server with health and the error interceptor. Not serving until `set_serving(True)`.

    With a `member`, every client needs a certificate of the fleet, and each call must be allowed by
    `tandem_runtime.certificates.access`. While the member's `plaintext` allows it, processes of release 0.2 are served
    in plain text at the same address. Without a member the server speaks plain text only.
    """

    def __init__(
        self,
        listen: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        member: FleetMember | None = None,
        insecure: bool = False,
        has_reflection: bool = False,
    ) -> None:
        """`register` adds the servicers; `service_names` are their full names, `tandem.v1.WorkerService`.

        `insecure` lets a server without a member listen beyond loopback. With `has_reflection` the server describes
        its methods to whoever may call it.
        """
        self._listen = listen
        self._member = member
        self._shared: SharedPort | None = None
        self._insecure = insecure
        self._service_names = list(service_names)
        self._health = _Health(["", *service_names])
        access = [AccessInterceptor(member)] if member is not None else []
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *access], options=_OPTIONS + _size_options(service_names)
        )
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        if has_reflection:
            names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen and return the real host:port, or unix:PATH. Raises InvalidRequest where it may not or cannot listen.

        In plain text it may listen on loopback and on a Unix socket only, unless it is `insecure`.
        """
        host, is_unix = self._listen, self._listen.startswith(_UNIX)
        if not is_unix:
            host, _ = split_address(self._listen)
            await self._check_encrypted(host)
        if self._member is not None and self._member.plaintext.is_allowed:
            return await self._start_shared(self._member)
        bound = self._bind()
        await self._start()
        if is_unix:
            await asyncio.to_thread(Path(self._listen.removeprefix(_UNIX)).chmod, 0o600)
        return self._listen if is_unix else f"{host}:{bound}"

    async def _start_shared(self, member: FleetMember) -> str:
        """Listen for TLS and plain text at one address."""
        self._shared = shared = SharedPort(member.plaintext)
        self._server.add_secure_port(f"{_UNIX}{shared.tls_path}", member.certificate.server_credentials())
        self._server.add_insecure_port(f"{_UNIX}{shared.plain_path}")
        await self._start()
        try:
            if self._listen.startswith(_UNIX):
                await shared.listen_unix(self._listen.removeprefix(_UNIX))
                return self._listen
            host, port = split_address(self._listen)
            return f"{host}:{await shared.listen(host, port)}"
        except InvalidRequest:
            await self.stop()
            raise

    async def _start(self) -> None:
        await self._health.apply(serving=False)
        await self._server.start()

    async def _check_encrypted(self, host: str) -> None:
        if self._member is None and not self._insecure and not await is_loopback(host):
            raise InvalidRequest(
                f"--listen {self._listen} is beyond loopback and the connection is not encrypted; listen on 127.0.0.1, "
                "give a certificate (--tls-cert), or say --insecure-plaintext if the network is trusted"
            )

    def _bind(self) -> int:
        try:
            if self._member is None:
                return self._server.add_insecure_port(self._listen)
            return self._server.add_secure_port(self._listen, self._member.certificate.server_credentials())
        except RuntimeError as error:
            raise InvalidRequest(
                f"cannot listen on {self._listen}: {error}; is the port taken? port 0 takes a free one"
            ) from error

    def set_serving(self, serving: bool) -> None:
        """Answer health checks, under "" and each service's name. Call on the event loop."""
        self._health.set(serving)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Report NOT_SERVING, refuse new calls, wait up to the grace period for running calls, cancel the rest."""
        await self._health.apply(serving=False)
        if self._shared is not None:
            self._shared.stop_accepting()
        await self._server.stop(grace_seconds)
        if self._shared is not None:
            await self._shared.close()


_UNIX = "unix:"


def _size_options(service_names: Sequence[str]) -> list[tuple[str, int]]:
    """Bound messages by the services of this server: the largest of what any of them takes and gives."""
    sizes = [SERVICES[name] for name in service_names if name in SERVICES] or [LARGEST]
    return [
        ("grpc.max_receive_message_length", max(size.request_bytes for size in sizes)),
        ("grpc.max_send_message_length", max(size.reply_bytes for size in sizes)),
    ]


class _Health:
    """The health servicer; applies changes in the order of the calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = names
        self._order = asyncio.Lock()
        self._changes = TaskSet()

    def set(self, serving: bool) -> None:
        self._changes.spawn(self.apply(serving))

    async def apply(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        async with self._order:
            for name in self._names:
                await self.servicer.set(name, status)


def split_address(address: str) -> tuple[str, int]:
    """Split host:port or [v6]:port; raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"{address!r} is not an address; give host:port, like 127.0.0.1:0", field="listen")
    return host, int(port)


async def is_loopback(host: str) -> bool:
    """True if every address of `host` is this machine's own."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return await _name_is_loopback(bare)


async def _name_is_loopback(name: str) -> bool:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequest(f"cannot resolve {name!r} to listen on it: {error}; give an address") from error
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
