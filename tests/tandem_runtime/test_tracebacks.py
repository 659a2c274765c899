"""Tracebacks in logs name places and classes, and quote nobody."""

from __future__ import annotations

import json
import logging
import sys
from io import StringIO

import pytest
import structlog

from tandem_runtime import log
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.tracebacks import format_traceback, message_of

SECRET = "MY SECRET PROMPT"


def fails(prompt: str) -> None:
    token = f"tdm_{prompt}"
    raise KeyError(token)


def traceback_of(error: BaseException) -> str:
    return format_traceback((type(error), error, error.__traceback__))


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "a library's"])
def test_neither_form_of_the_log_has_local_variables_or_a_quoted_prompt(
    monkeypatch: pytest.MonkeyPatch, as_json: bool, is_ours: bool
) -> None:
    written = StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        log.configure("tandem-test", as_json)
        logger = log.get_logger("tests") if is_ours else logging.getLogger("library")
        try:
            fails(SECRET)
        except KeyError:
            logger.exception("it_failed")
    finally:
        root.handlers = before
        structlog.reset_defaults()
    text = written.getvalue()
    assert SECRET not in text
    assert "it_failed" in text and "KeyError (message withheld" in text
    assert "in fails" in text and "raise KeyError(token)" in text, "the frames and their source are there"
    if as_json:
        assert "in fails" in json.loads(text)["exception"]


def test_causes_and_members_of_groups_are_there_without_their_messages() -> None:
    try:
        try:
            fails(SECRET)
        except KeyError as error:
            raise ExceptionGroup(SECRET, [ValueError(SECRET), OSError(2, "No such file")]) from error
    except ExceptionGroup as group:
        text = traceback_of(group)
    assert SECRET not in text
    assert text.index("KeyError (message withheld") < text.index("ExceptionGroup (message withheld")
    assert "ValueError (message withheld" in text and "FileNotFoundError: [Errno 2] No such file" in text


def test_an_exception_that_is_its_own_context_is_formatted_once() -> None:
    first, second = ValueError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert traceback_of(first).count("ValueError") == 1


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError(SECRET), "KeyError (message withheld: it may quote a request)"),
        (UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET), "UnicodeDecodeError (message withheld"),
        (InvalidRequest(f"no model {SECRET!r} here"), "InvalidRequest: the caller's answer has the message"),
        (Unavailable("worker w is gone"), "Unavailable: worker w is gone"),
        (RuntimeError("the queue is closed"), "RuntimeError: the queue is closed"),
        (ConnectionRefusedError(111, "refused"), "ConnectionRefusedError: [Errno 111] refused"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_message_is_shown_if_it_cannot_quote_a_request(error: Exception, shown: str) -> None:
    assert message_of(error).startswith(shown)
    assert SECRET not in message_of(error)
