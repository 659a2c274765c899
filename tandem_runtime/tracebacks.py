"""Formats exceptions for logs: without local variables, and without messages that may quote a request.

`KeyError: 'the prompt'` and `invalid literal for int(): 'the token'` are what Python makes of a caller's text. So only
messages of classes whose texts come from the code or from the operating system are kept. The frames name the place.
"""

from __future__ import annotations

import traceback
from types import TracebackType

from tandem_runtime.errors import TandemError

_WITHHELD = "(message withheld: it may quote a request)"

_HARMLESS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    MemoryError,
    NameError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
)
"""Messages name types, attributes, files and system errors, or are sentences of our own code."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def format_traceback(exc_info: ExcInfo) -> str:
    """Return the traceback of an exception and of those that caused it, the first cause first."""
    return "\n".join(_lines(exc_info[1], exc_info[2], set()))


def message_of(error: BaseException) -> str:
    """Return an exception's class, and its message unless it may quote a request."""
    kind = type(error).__name__
    if isinstance(error, TandemError):
        return f"{kind}: {error.log_text}"
    if isinstance(error, _HARMLESS) or type(error) is RuntimeError:
        return f"{kind}: {error}" if str(error) else kind
    return f"{kind} {_WITHHELD}" if str(error) else kind


def _lines(error: BaseException, trace: TracebackType | None, seen: set[int]) -> list[str]:
    seen.add(id(error))
    lines: list[str] = []
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        lines += _lines(before, before.__traceback__, seen)
        lines.append(
            "The above exception was the direct cause of the following one:"
            if before is error.__cause__
            else "During handling of the above exception, another one occurred:"
        )
    if trace is not None:
        lines.append("Traceback (most recent call last):")
        lines += [line.rstrip("\n") for line in traceback.format_tb(trace)]
    lines.append(message_of(error))
    if isinstance(error, BaseExceptionGroup):
        for index, member in enumerate(error.exceptions):
            if id(member) not in seen:
                lines.append(f"exception {index + 1} of {len(error.exceptions)} of the group:")
                lines += _lines(member, member.__traceback__, seen)
    return lines
