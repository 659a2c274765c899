"""Finds every method of every service in the protos, and serves them with servicers that implement nothing."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

import tandem.v1
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.access import RULES
from tandem_runtime.certificates.names import Role
from tandem_runtime.errors import InternalError

KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


_LOST_STATUS = "Internal error from Core"
"""grpcio's own words, now and then, when a server ends a stream before the client's first message has left."""
_TRIES = 5


@dataclass(frozen=True)
class Method:
    """One RPC: its path, its kind and its messages."""

    path: str
    kind: str
    request: type[Message]
    reply: type[Message]

    async def call(self, channel: grpc.aio.Channel, request: Message) -> None:
        """Call with one message and read the first reply; raises what the call raises."""
        for _ in range(_TRIES - 1):
            try:
                return await self._call(channel, request)
            except InternalError as error:
                if _LOST_STATUS not in error.message:
                    raise
        return await self._call(channel, request)

    async def _call(self, channel: grpc.aio.Channel, request: Message) -> None:
        make = getattr(channel, self.kind)
        start = make(
            self.path, request_serializer=self.request.SerializeToString, response_deserializer=self.reply.FromString
        )
        call = start(_once(request) if self.kind.startswith("stream") else request, timeout=10)
        try:
            await (call.read() if self.kind.endswith("stream") else call)
        finally:
            call.cancel()


async def _once(message: Message) -> Any:
    yield message


def services() -> list[Any]:
    """Return the descriptor of each service in the protos, and the health service's."""
    names = [module.name for module in pkgutil.iter_modules(tandem.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"tandem.v1.{name}").DESCRIPTOR for name in names]
    return [service for file in (*files, health_pb2.DESCRIPTOR) for service in file.services_by_name.values()]


def methods() -> list[Method]:
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            KINDS[method.client_streaming, method.server_streaming],
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
        )
        for service in services()
        for method in service.methods
    ]


def add_all(server: grpc.aio.Server) -> None:
    """Add a servicer for each service but health's, which every server has. It implements nothing.

    Streams of which each request is checked are read first.
    """
    for service in services():
        if service.full_name.startswith("tandem."):
            stem = service.file.name.removesuffix(".proto").replace("/", ".")
            module = importlib.import_module(f"{stem}_pb2_grpc")
            add: Callable[..., None] = getattr(module, f"add_{service.name}Servicer_to_server")
            servicer = getattr(module, f"{service.name}Servicer")()
            for method in service.methods:
                if method.client_streaming and RULES[f"/{service.full_name}/{method.name}"].claims_id is not None:
                    setattr(servicer, method.name, _read_and_raise)
            add(servicer, server)


async def _read_and_raise(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for _ in requests:
        raise NotImplementedError
    yield  # this is a generator


def truthful(method: Method, role: Role, id: str) -> Message:
    """Return a request that states who sends it, where its message can."""
    roles = {"prefill": pb.WORKER_ROLE_PREFILL, "decode": pb.WORKER_ROLE_DECODE, "kv": pb.WORKER_ROLE_KV}
    request: Any = method.request()
    fields = method.request.DESCRIPTOR.fields_by_name
    if "info" in fields:
        request.info.worker_id = id
        request.info.role = roles.get(role, pb.WORKER_ROLE_UNSPECIFIED)
    elif "worker_id" in fields:
        request.worker_id = id
    elif "heartbeat" in fields:
        request.heartbeat.worker_id = id
    return request  # type: ignore[no-any-return]
