"""Sends a gateway what a host has, the heartbeats of its workers, and the tables that the gateway asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from kv_transfer_svc.host_points import HostPoints
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1.tables_pb2 import TablesReply
from tandem_runtime.kv.table_parts import answer_parts

_EVENT_SECONDS = 0.5
"""Between two messages of block events to one reader."""
_HEARTBEAT_SECONDS = 0.75
"""Heartbeats of workers wait for a batch of points, and go alone after so long."""


async def event_stream(
    points: HostPoints,
    tables: Callable[[int], TablesReply],
    requests: AsyncIterator[kv.BlockEventsRequest],
) -> AsyncGenerator[kv.BlockEventBatch, None]:
    """Yield the host's block events without an end, and parts of tables between them; `tables` takes `max_rows`.

    Raises what reading the requests raises. When they end, as those of an earlier release do, the events go on.
    """
    outgoing: asyncio.Queue[kv.BlockEventBatch | Exception] = asyncio.Queue(1)  # a slow reader slows both
    sources = block_events(points), _answers(tables, requests)
    tasks = [asyncio.create_task(_pass_on(source, outgoing)) for source in sources]
    try:
        while True:
            batch = await outgoing.get()
            if isinstance(batch, Exception):
                raise batch
            batch.answers_tables = batch.is_snapshot
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def block_events(points: HostPoints) -> AsyncGenerator[kv.BlockEventBatch, None]:
    """Yield everything that a host's places have, then their changes and its workers' heartbeats, without an end."""
    with points.read() as reader:
        while True:
            changed = points.changed.next()
            for batch in reader.take():
                yield batch
            await asyncio.sleep(_EVENT_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_SECONDS - _EVENT_SECONDS):
                    await changed.wait()


async def _answers(
    tables: Callable[[int], TablesReply], requests: AsyncIterator[kv.BlockEventsRequest]
) -> AsyncGenerator[kv.BlockEventBatch, None]:
    async for request in requests:
        if request.HasField("tables"):
            for part in answer_parts(request.tables, tables):
                yield kv.BlockEventBatch(tables=part)


async def _pass_on(
    source: AsyncGenerator[kv.BlockEventBatch, None], outgoing: asyncio.Queue[kv.BlockEventBatch | Exception]
) -> None:
    try:
        async with contextlib.aclosing(source):
            async for batch in source:
                await outgoing.put(batch)
    except Exception as error:  # noqa: BLE001 - not swallowed: the stream ends with this error
        await outgoing.put(error)
