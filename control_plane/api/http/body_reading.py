"""Reads the body of an HTTP request, within the limits of its size and of its account."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from control_plane.api.http.body import parse_object
from control_plane.api.http.connections import BodyHold
from control_plane.api.http.errors import BodyTooLarge
from control_plane.api.http.request_context import caller_of, services_of, timeline_of
from control_plane.text.prepared import TextJob


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object, whatever its Content-Type. Raise InvalidRequest or BodyTooLarge."""
    return parse_object(await read_body(request))


async def read_text_body(request: Request, job: TextJob) -> bytes:
    """Return the body of a request for text, as `read_body`. Raise Overloaded if it would not be let in in time.

    That is before any task is started for the request: under overload most requests end here.
    """
    raw = await read_body(request)
    await services_of(request).text.refuse_early(job, raw, caller_of(request))
    return raw


async def read_body(request: Request) -> bytes:
    """Return the body. Raise BodyTooLarge, by Content-Length before any of it is read, or AccountBodiesFull.

    Its bytes count as the account's until `body_is_prepared`.
    """
    limit_bytes = services_of(request).settings.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > len(str(limit_bytes)) or int(length) > limit_bytes):
        raise _too_large(limit_bytes)
    hold: BodyHold | None = getattr(request.state, "body_hold", None)  # a test without the server has none
    if hold is not None:
        hold.belongs_to(caller_of(request).account)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit_bytes:
            raise _too_large(limit_bytes)
    timeline_of(request).end("body")
    return bytes(raw)


def body_is_prepared(request: Request) -> None:
    """Count the bytes of the request's body no longer."""
    hold: BodyHold | None = getattr(request.state, "body_hold", None)
    if hold is not None:
        hold.release()


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {limit_bytes:,} bytes, which is the limit; send a smaller body")
