"""Answers several prompts of one request at the same time, as one stream."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import anyio

from control_plane.explain.history import History
from control_plane.generation import ModelDescription, Usage
from control_plane.text.choice import TextDelta
from control_plane.text.text_stream import TextStream
from tandem_runtime.errors import note_work


class MultiPromptStream:
    """Several streams of one model as one stream.

    Choice c of prompt p has index p * num_choices_per_prompt + c, as in OpenAI's API.
    """

    def __init__(self, streams: Sequence[TextStream], before: Usage) -> None:
        """`before`: usage of the same HTTP request before these streams."""
        self.streams = list(streams)
        self._before = before

    @property
    def model(self) -> ModelDescription:
        return self.streams[0].model

    @property
    def num_choices(self) -> int:
        return sum(stream.num_choices for stream in self.streams)

    @property
    def histories(self) -> Sequence[History]:
        return [history for stream in self.streams for history in stream.histories]

    @property
    def usage(self) -> Usage:
        return reduce(operator.add, (stream.usage for stream in self.streams), self._before)

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        async for batch in self.batches():
            for delta in batch:
                yield delta

    async def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield batches of all streams as they arrive. The first failure ends all streams."""
        if len(self.streams) == 1:  # no other stream to wait for
            async for texts in self.streams[0].batches():
                yield texts
            return
        iterators = [aiter(stream.batches()) for stream in self.streams]
        pending = {_next(iterator): index for index, iterator in enumerate(iterators)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = pending.pop(task)
                    batch = task.result()
                    if batch is not None:
                        yield self._renumbered(batch, index)
                        pending[_next(iterators[index])] = index
        finally:
            await _cancel(pending)
            await self.aclose()

    async def aclose(self) -> None:
        await close_all(self.streams)

    def _renumbered(self, batch: Iterator[TextDelta], index: int) -> Iterator[TextDelta]:
        first = index * self.streams[index].num_choices
        return batch if first == 0 else (delta._replace(choice_index=first + delta.choice_index) for delta in batch)


async def start_all(starting: Sequence[Awaitable[TextStream]], before: Usage) -> MultiPromptStream:
    """Wait until every stream has started. If one is refused, close the others and raise its error."""
    tasks = [asyncio.ensure_future(start) for start in starting]
    try:
        return MultiPromptStream(await asyncio.gather(*tasks), before)
    except BaseException as error:
        if before.microneurons or any(_has_result(task) for task in tasks):  # the others' prompts, or scores
            note_work(error)
        with anyio.CancelScope(shield=True):
            await _cancel(tasks)
            await close_all([task.result() for task in tasks if _has_result(task)])
        raise


def _has_result(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def close_all(streams: Sequence[TextStream]) -> None:
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*(stream.aclose() for stream in streams))


def _next(iterator: AsyncIterator[Iterator[TextDelta]]) -> asyncio.Future[Iterator[TextDelta] | None]:
    return asyncio.ensure_future(anext(iterator, None))


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `tasks` and wait until all have ended. The client has the first failure; others are not reported."""
    tasks = list(tasks)
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved
