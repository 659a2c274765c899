"""How does a coroutine wait for a thread that works in memory which is not the thread's own?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

Result = TypeVar("Result")


async def finished(threads: Executor, work: Callable[[], Result], interrupt: Callable[[], None]) -> Result:
    """Return what `work` returns in one of `threads`.

    A caller that is cancelled interrupts the work and still waits for its end: memory that it lent is its own again.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        interrupt()
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # once more: it is on its way out
                continue
        future.exception()  # has been seen: whoever asked is gone
        raise
