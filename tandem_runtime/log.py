"""Logs events with fields: `log.info("kv_pulled", num_blocks=12, seconds=0.004)`.

One line per event on stderr: readable on a terminal, JSON elsewhere. Each line has the request id and the trace of the
task that logs. Both forms have plain tracebacks (tandem_runtime.tracebacks): no local variables, no quoted requests.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import structlog
from opentelemetry import trace

from tandem_runtime.tracebacks import format_traceback

_PACKAGES = frozenset(
    {
        "control_plane",
        "decode_svc",
        "encode_svc",
        "kv_transfer_svc",
        "prefill_svc",
        "tandem_engine",
        "tandem_machine",
        "tandem_runtime",
        "tandem_worker",
    }
)

Event = MutableMapping[str, Any]
Listener = Callable[[Mapping[str, Any]], None]

_listeners: list[Listener] = []


def configure(
    service: str, json: bool | None = None, *, level: str = "info", fields: Mapping[str, str] | None = None
) -> None:
    """Send structlog's and the standard library's logs to stderr, `service` and `fields` with each line.

    `json=None` means JSON unless stderr is a terminal. A later call replaces an earlier one.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    shared = _shared_processors({"service": service, **(fields or {})})
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            _tell_listeners,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a module's logger outlives a second configure
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_for_the_log)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=_renderers(as_json), foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _is_for_the_log(record: logging.LogRecord) -> bool:
    """Return whether a line is ours, or not a debug line: libraries' debug lines quote what passes through them."""
    return record.levelno >= logging.INFO or record.name.partition(".")[0] in _PACKAGES


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with each of our lines that is logged inside the `with`, on the thread that logs it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell_listeners(_: Any, __: str, event: Event) -> Event:
    for listener in _listeners:
        listener(event)
    return event


def bound(**fields: object) -> AbstractContextManager[None]:
    """Add fields, like `request_id`, to every line the current task logs inside the `with`."""
    return structlog.contextvars.bound_contextvars(**fields)


def request_id() -> str:
    """Return the request id bound to the current task, "" if there is none."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def _shared_processors(fields: Mapping[str, str]) -> list[Any]:
    def add_fields(_: Any, __: str, event: Event) -> Event:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_fields,
        _add_trace,
    ]


def _add_trace(_: Any, __: str, event: Event) -> Event:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = f"{span.trace_id:032x}"
        event["span_id"] = f"{span.span_id:016x}"
    return event


def _renderers(as_json: bool) -> list[Any]:
    shared = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.ExceptionRenderer(format_traceback),
    ]
    if as_json:
        return [*shared, structlog.processors.JSONRenderer(default=str)]
    # The default formatter prints the local variables of each frame: prompts, tokens, keys.
    plain = structlog.dev.plain_traceback
    return [*shared, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
