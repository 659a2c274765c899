"""How are several prompts of one request answered at the same time?"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import anyio

from control_plane.generation import ModelDescription, Usage
from control_plane.text.choice import TextDelta
from control_plane.text.text_service import TextStream


class SideBySide:
    """Streams of the same model as one; choice c of prompt p has index p * choices per prompt + c, as OpenAI counts."""

    def __init__(self, streams: Sequence[TextStream], before: Usage) -> None:
        """`before`: what the same request has used up to here."""
        self.streams = list(streams)
        self._before = before

    @property
    def model(self) -> ModelDescription:
        return self.streams[0].model

    @property
    def num_choices(self) -> int:
        return sum(stream.num_choices for stream in self.streams)

    @property
    def usage(self) -> Usage:
        return reduce(operator.add, (stream.usage for stream in self.streams), self._before)

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        async for batch in self.batches():
            for delta in batch:
                yield delta

    async def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield batches of all streams as they come; the first failure ends all of them."""
        if len(self.streams) == 1:  # nothing to wait for beside it
            async for texts in self.streams[0].batches():
                yield texts
            return
        iterators = [aiter(stream.batches()) for stream in self.streams]
        coming = {_next(iterator): index for index, iterator in enumerate(iterators)}
        try:
            while coming:
                done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = coming.pop(task)
                    batch = task.result()
                    if batch is not None:
                        yield self._renumbered(batch, index)
                        coming[_next(iterators[index])] = index
        finally:
            await _cancel(coming)
            await self.aclose()

    async def aclose(self) -> None:
        await close_all(self.streams)

    def _renumbered(self, batch: Iterator[TextDelta], index: int) -> Iterator[TextDelta]:
        first = index * self.streams[index].num_choices
        return batch if first == 0 else (replace(delta, choice_index=first + delta.choice_index) for delta in batch)


async def start_all(starting: Sequence[Awaitable[TextStream]], before: Usage) -> SideBySide:
    """Wait until every stream has started; if one is refused, the others are closed and its error is raised."""
    tasks = [asyncio.ensure_future(start) for start in starting]
    try:
        return SideBySide(await asyncio.gather(*tasks), before)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _cancel(tasks)
            await close_all([task.result() for task in tasks if not task.cancelled() and task.exception() is None])
        raise


async def close_all(streams: Sequence[TextStream]) -> None:
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*(stream.aclose() for stream in streams))


def _next(iterator: AsyncIterator[Iterator[TextDelta]]) -> asyncio.Future[Iterator[TextDelta] | None]:
    return asyncio.ensure_future(anext(iterator, None))


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `tasks` and wait until they have ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(running)
