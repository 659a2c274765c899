"""Starts, drains and ends a process."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tandem_machine.limits import too_few_processes, with_remedy
from tandem_runtime import frozen, loop_lag, loop_turns, metrics, tracing
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.garbage import forget_what_is_loaded, look_once_at_what_lives
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(main: Callable[[asyncio.Event], Awaitable[int]], stall_seconds: float = loop_lag.STALL_SECONDS) -> int:
    """Run `main` until it returns the process's exit status.

    Logs each time that the event loop stands still for longer than `stall_seconds`; 0: never. Ends the process if its
    interpreter is frozen (`tandem_runtime.frozen`).

    The first SIGTERM or SIGINT sets the event passed to `main`: finish running work, take none. The second cancels
    `main` (status 128 + signal), the third ends the process at once. An exception of `main` is logged and gives status
    1; a refused setting gives status 2, and so does a limit of processes that is too small.
    """
    forget_what_is_loaded()
    look_once_at_what_lives()
    faulthandler.enable(file=sys.__stderr__ or sys.stderr)  # a signal that ends this process leaves stacks on stderr
    try:
        if why := too_few_processes(1):
            raise InvalidRequest(why)
        with _exceptions_logged(), frozen.watched():
            return loop_turns.run(_run(main, stall_seconds))
    except InvalidRequest as error:
        log.error("refused_to_start", reason=error.message)
        return 2
    except Exception as error:
        # No request is the cause: their exceptions end in their answers. So the message may be shown.
        log.exception("process_failed", error=with_remedy(str(error) or type(error).__name__))
        return 1
    finally:
        tracing.shutdown()
        metrics.shutdown()


@contextlib.contextmanager
def _exceptions_logged() -> Iterator[None]:
    """Log exceptions that nobody can catch, instead of printing them: the interpreter's text may quote a request."""

    def in_thread(args: threading.ExceptHookArgs) -> None:
        log.error("thread_failed", thread=args.thread.name if args.thread else "", exc_info=args.exc_value)

    def unraisable(args: Any) -> None:
        log.error("exception_ignored", exc_info=args.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception of a callback, or of a task that nobody awaits. asyncio's own line would quote its message."""
    what, task = str(context.get("message", "")).partition(":")[0], context.get("task") or context.get("future")
    what = "Exception in callback" if what.startswith("Exception in callback") else what  # its arguments follow
    name = task.get_name() if isinstance(task, asyncio.Task) else ""
    log.error("event_loop_exception", what=what, task=name, exc_info=context.get("exception"))


async def _run(main: Callable[[asyncio.Event], Awaitable[int]], stall_seconds: float) -> int:
    drain = asyncio.Event()
    task = asyncio.ensure_future(main(drain))
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loop_exception)

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
        with loop_lag.watched(stall_seconds):
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
