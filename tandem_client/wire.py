"""Reads and writes the messages of Cloudflare's REST API.

An answer is an envelope `{result, success, errors, messages}`, or a stream of `data: {"response": ...}` events that
ends with `data: [DONE]`. These are pure functions on text and JSON, without connections.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from tandem_client.errors import TandemAPIError, api_error, retry_after_seconds

DONE = "[DONE]"


def run_path(account: str, model: str) -> str:
    """Return the path that runs `model`; slashes stay, special characters are escaped."""
    return f"/client/v4/accounts/{quote(account, safe='')}/ai/run/{quote(model, safe='@/:')}"


def request_headers(token: str | None, extra_headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of a call; the caller's headers override the others."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return headers | {name.lower(): value for name, value in (extra_headers or {}).items()}


def is_loopback(base_url: str) -> bool:
    """Return whether the address is this machine, which is called without a proxy."""
    host = urlsplit(base_url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def result_of(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """Return the envelope's result, or raise the error in the envelope or the status."""
    document = _parse(body)
    if 200 <= status < 300 and isinstance(document, dict) and document.get("success", True) and "result" in document:
        return document["result"]
    raise error_of(status, headers, body)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> TandemAPIError:
    """Return the error in a response: an envelope, an OpenAI error, or the text of a proxy."""
    document = _parse(body)
    code, message = _first_error(document) if isinstance(document, dict) else (0, "")
    if not message:
        text = body.decode("utf-8", errors="replace").strip()[:500]
        message = f"HTTP {status} with no error in a form Tandem sends: {text or 'an empty body'}"
    error = api_error(status, code, message, retry_after_seconds(headers.get("retry-after")))
    error.may_repeat = error.may_repeat and headers.get("x-should-retry") != "false"
    return error


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call: the first part has the name; the joined arguments are JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class StreamEvent:
    """One event of a token stream: text, thinking, parts of tool calls, the finish reason, usage, seams, or the end."""

    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    calls: tuple[CallPart, ...] = ()
    seams: tuple[dict[str, Any], ...] = ()


def stream_event(data: str) -> StreamEvent:
    """Parse one event's data; raise the error of an error event."""
    if data == DONE:
        return StreamEvent(done=True)
    document = _parse(data.encode())
    if not isinstance(document, dict):
        raise TandemAPIError(None, 0, f"the stream holds an event that is not a JSON object: {data[:200]}")
    if "errors" in document or "error" in document:
        code, message = _first_error(document)
        raise api_error(None, code, message or f"the stream reports an error without a message: {data[:200]}")
    usage = None if document.get("choices") else document.get("usage")
    return StreamEvent(
        text=_text(document),
        thinking=_thinking(document),
        finish_reason=_finish_reason(document),
        usage=usage,
        calls=tuple(_calls(document)),
        seams=tuple(document.get("seams") or ()),
    )


def _calls(document: dict[str, Any]) -> Iterator[CallPart]:
    """Yield the complete calls of a native event, or the parts of calls in an OpenAI event."""
    choice = (document.get("choices") or [{}])[0]
    parts = document.get("tool_calls") or (choice.get("delta") or {}).get("tool_calls") or []
    for at, part in enumerate(parts):
        function = part.get("function") or part
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
        yield CallPart(part.get("index", at), function.get("name"), text)


def _text(document: dict[str, Any]) -> str:
    """Return the text of a native chunk, or of an OpenAI chunk, which some models stream on the same route."""
    text = document.get("response")
    if text is None and document.get("choices"):
        choice = document["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
    return text if isinstance(text, str) else ""


def _thinking(document: dict[str, Any]) -> str:
    """Return the thinking in a native or an OpenAI chunk."""
    choice = (document.get("choices") or [{}])[0]
    thinking = document.get("reasoning_content") or (choice.get("delta") or {}).get("reasoning_content")
    return thinking if isinstance(thinking, str) else ""


def _finish_reason(document: dict[str, Any]) -> str | None:
    reason = (document.get("choices") or [document])[0].get("finish_reason")
    return reason if isinstance(reason, str) else None


def _first_error(document: dict[str, Any]) -> tuple[int | str, str]:
    errors = document.get("errors") or [document.get("error")]
    first = errors[0] if isinstance(errors, list) else errors
    if isinstance(first, dict):
        return first.get("code") or 0, str(first.get("message") or "")
    return 0, str(first or "")


def _parse(body: bytes) -> Any:
    """Return the JSON in `body`, or None if it is not JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None
