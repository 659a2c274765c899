"""Maps the methods of a real servicer to paths of the simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def methods_of(service: ServiceDescriptor, servicer: Any) -> dict[str, Callable[..., Any]]:
    """Return a function from bytes to bytes for each path."""
    return {
        f"/{service.full_name}/{method.name}": _answering(method, getattr(servicer, method.name))
        for method in service.methods
        if hasattr(servicer, method.name)
    }


def _answering(method: MethodDescriptor, answer: Callable[..., Any]) -> Callable[..., Any]:
    parse = GetMessageClass(method.input_type).FromString
    if method.client_streaming:
        return lambda requests, context: _serialized(answer(_parsed(requests, parse), context))
    if method.server_streaming:
        return lambda request, context: _serialized(answer(parse(request), context))

    async def unary(request: bytes) -> bytes:
        reply: bytes = (await answer(parse(request), None)).SerializeToString()
        return reply

    return unary


async def _serialized(messages: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message.SerializeToString()


async def _parsed(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield parse(request)
