"""The stream of seals from a prefill worker to the KV service, which saves the set-up of a call for each seal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import DeadlineExceeded, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)


def seal_request(handle: pb.KvHandle, slabs: Sequence[kv.Slab], closed: kv.Closed | None) -> kv.SealRequest:
    """Return the request that seals slabs; `closed` (num_blocks, first_tokens) closes the handle with them."""
    request = kv.SealRequest(handle=handle, slabs=slabs)
    if closed is not None:
        request.close, request.num_blocks = True, closed.num_blocks
        request.first_tokens.extend(closed.first_tokens)
    return request


class SealStream:
    """The seals of one handle, open while the handle is filled; call `close` at the end.

    A message on an open stream takes half the time of a call (measured: 0.5 ms against 1.0 ms, from one process to
    another that sleeps). After the stream has failed, each seal is a call of its own, repeated while the service cannot
    be reached: a repeated seal changes nothing.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        call: Callable[[kv.SealRequest], Awaitable[kv.SealReply]],
        seconds: float,
    ) -> None:
        self._stream = start()
        self._call = call
        self._seconds = seconds
        self._has_failed = False

    async def seal(self, request: kv.SealRequest) -> kv.SealReply:
        """Return once the service has accepted the seal; raises TandemError as `KvClient.seal` does."""
        if not self._has_failed:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._stream.write(request)
                    reply = await self._stream.read()
                if isinstance(reply, kv.SealReply):
                    return reply
            except Unavailable as error:
                log.debug("seal_stream_failed", reason=error.message)
            except TimeoutError as error:
                raise DeadlineExceeded(f"the KV service has not answered a seal for {self._seconds:g} s") from error
            self._has_failed = True
        return await self._call(request)

    def close(self) -> None:
        """Cancel the stream; allowed after the stream has failed."""
        self._stream.cancel()
