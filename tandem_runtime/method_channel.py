"""The base of gRPC channels that decide at each call over which connection it goes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NoReturn, Self

import grpc

MethodKind = Literal["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def refuse_closed() -> NoReturn:
    """Raise what gRPC raises for a call on a closed channel.

    Ask before taking a method from a channel that may be closed: gRPC (1.85) registers the method in the memory of the
    freed channel before it looks whether the channel is closed. That ends the process by a signal, or later.
    """
    raise grpc.aio.UsageError("Channel is closed.")


class MethodChannel(grpc.aio.Channel):
    """Maps the four factories of gRPC's stubs to one method, and closes the channel at the end of a block."""

    @abstractmethod
    def _method(self, kind: MethodKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the starter of one method's calls; `args` and `kwargs` are those of the factory named `kind`."""

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_stream", args, kwargs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
