"""Serves gRPC: health, reflection and the error interceptor around a process's services."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.interceptors import ErrorInterceptor
from tandem_runtime.tasks import TaskSet

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # without it two servers share a port, and each gets half of the calls
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),  # accept our clients' keepalive pings at any rate
]


class GrpcServer:
    """A gRPC server with health, reflection and the error interceptor. Not serving until `set_serving(True)`."""

    def __init__(
        self,
        listen: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        insecure: bool = False,
    ) -> None:
        """`register` adds the servicers; `service_names` are their full names, `tandem.v1.WorkerService`."""
        self._listen = listen
        self._insecure = insecure
        self._service_names = list(service_names)
        self._health = _Health(["", *service_names])
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_OPTIONS)
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen and return the real host:port. Raises InvalidRequest beyond loopback and where the port is taken."""
        host, _ = split_address(self._listen)
        if not self._insecure and not await is_loopback(host):
            raise InvalidRequest(
                f"--listen {self._listen} is beyond loopback and the connection is not encrypted; "
                "listen on 127.0.0.1, or say --insecure if the network is trusted"
            )
        try:
            bound = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise InvalidRequest(
                f"cannot listen on {self._listen}: {error}; is the port taken? port 0 takes a free one"
            ) from error
        await self._health.apply(serving=False)
        await self._server.start()
        return f"{host}:{bound}"

    def set_serving(self, serving: bool) -> None:
        """Answer health checks, under "" and each service's name. Call on the event loop."""
        self._health.set(serving)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Report NOT_SERVING, refuse new calls, wait up to the grace period for running calls, cancel the rest."""
        await self._health.apply(serving=False)
        await self._server.stop(grace_seconds)


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
