"""Starts, drains and ends a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Awaitable, Callable

from tandem_runtime import metrics, tracing
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run `main` until it returns the process's exit status.

    The first SIGTERM or SIGINT sets the event passed to `main`: finish running work, take none. The second cancels
    `main` (status 128 + signal), the third ends the process at once. An exception of `main` is logged and gives status
    1; a refused setting gives status 2.
    """
    _forget_what_is_loaded()
    try:
        return asyncio.run(_run(main))
    except InvalidRequest as error:
        log.error("refused_to_start", reason=error.message)
        return 2
    except Exception:
        log.exception("process_failed")
        return 1
    finally:
        tracing.shutdown()
        metrics.shutdown()


def _forget_what_is_loaded() -> None:
    """Exclude all objects of this moment from garbage collection: imports live as long as the process.

    A collection over them takes 40 to 150 ms, in which no stream would progress.
    """
    gc.collect()
    gc.freeze()


async def _run(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    drain = asyncio.Event()
    task = asyncio.ensure_future(main(drain))
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        log.info("signal_received", signal=number.name, action="drain" if len(received) == 1 else "cancel")
        if len(received) == 1:
            drain.set()
        else:
            _forget_signals(loop)
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[-1]
    finally:
        _forget_signals(loop)


def _forget_signals(loop: asyncio.AbstractEventLoop) -> None:
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):
            loop.remove_signal_handler(number)
