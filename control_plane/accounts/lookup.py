"""How is the database asked for many rows at once? In one read, for all who ask while another is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

from tandem_runtime.errors import InternalError, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_MAX_TOGETHER = 256


class Lookup(Generic[T]):
    """Finds things by digest, on one event loop. No answer is from a read that began before it was asked for."""

    def __init__(self, read: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, T]]]) -> None:
        self._read = read
        self._wanted: dict[bytes, asyncio.Future[T | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def find(self, digest: bytes) -> T | None:
        """Return what has this digest, if anything has; raises what the read raises."""
        found = self._wanted.get(digest)
        if found is None:
            found = self._wanted[digest] = asyncio.get_running_loop().create_future()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_all())
        return await asyncio.shield(found)

    async def _read_all(self) -> None:
        try:
            while self._wanted:
                batch = {digest: self._wanted.pop(digest) for digest in list(islice(self._wanted, _MAX_TOGETHER))}
                await self._answer(batch)
        finally:
            self._reader = None

    async def _answer(self, batch: Mapping[bytes, asyncio.Future[T | None]]) -> None:
        try:
            holders = await self._read(list(batch))
        except TandemError as error:
            _fail(batch, error)
        except Exception as bug:
            log.exception("lookup_broke")
            _fail(batch, InternalError(f"the database could not be read: {bug!r}"))
        else:
            for digest, found in batch.items():
                found.set_result(holders.get(digest))


def _fail(batch: Mapping[bytes, asyncio.Future[T | None]], error: TandemError) -> None:
    for found in batch.values():
        found.set_exception(error)
        found.exception()  # whoever waited may have left: nobody need read it
