"""Gives the code under test a virtual clock, and checks its logs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import structlog

_PACKAGES = (
    "tandem_runtime",
    "tandem_worker",
    "prefill_svc",
    "decode_svc",
    "kv_transfer_svc",
    "control_plane",
    "tandem_engine",
)
_START = 1_700_000_000.0


class VirtualTime:
    """Replaces the module `time` in the packages that import it."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self.perf_counter = seconds
        self.monotonic = seconds

    def time(self) -> float:
        return _START + self._seconds()

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


@contextlib.contextmanager
def installed(seconds: Callable[[], float]) -> Iterator[VirtualTime]:
    """Install the virtual clock in every module of the product."""
    virtual = VirtualTime(seconds)
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _PACKAGES and vars(module).get("time") is time
    ]
    for module in modules:
        vars(module)["time"] = virtual
    try:
        yield virtual
    finally:
        for module in modules:
            vars(module)["time"] = time


@contextlib.contextmanager
def logs_checked(on_error: Callable[[str], None]) -> Iterator[None]:
    """Drop log events except errors: code under test logs an error only for its own faults."""

    def take(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
        if level in ("error", "exception", "critical"):
            error = sys.exc_info()[1]
            on_error(f"{event} {error!r}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[take],
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
