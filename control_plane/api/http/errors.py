"""Writes each error in the format that the request's endpoint uses.

path                     format       body
/client/v4/...           cloudflare   {result, success, errors: [{code, message}], messages}
/ai-api/... and others   cloudflare   the same; read by the binding's calls other than `run`
/run, /ai-gateway/run    binding      {internalCode, name, message, description}; read by `env.AI.run`
anything else            openai       {error: {message, type, param, code}}
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from http import HTTPStatus
from typing import Any, Literal

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from control_plane.accounts.errors import AlreadyThere, LimitReached, NoSuchThing, NotAllowed
from control_plane.api.http.route_names import name_of
from control_plane.drain import GatewayDraining
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unavailable,
    has_work,
    note_work,
)
from tandem_runtime.log import get_logger

ErrorFormat = Literal["openai", "cloudflare", "binding"]
_SECONDS_PER_LINE = 1.0
"""Between two lines about refusals of one kind."""

log = get_logger(__name__)


class BodyTooLarge(InvalidRequest):
    """HTTP only: the body is larger than the limit."""


class BodyMissing(InvalidRequest):
    """HTTP only: the request has no body."""


class HeaderMissing(InvalidRequest):
    """HTTP only: a required header is missing."""


class NoSuchRoute(InvalidRequest):
    """HTTP only: no endpoint has this path."""


class MethodNotAllowed(InvalidRequest):
    """HTTP only: the endpoint does not support this method."""


class MalformedRequest(InvalidRequest):
    """HTTP only: what came is not HTTP, or HTTP that no client sends."""


class HeadTooLarge(InvalidRequest):
    """HTTP only: the request's head is larger than the limit."""


class UrlTooLong(InvalidRequest):
    """HTTP only: the request's URL is longer than the limit."""


class RequestTooSlow(InvalidRequest):
    """HTTP only: the request's head or body did not come in time."""


class HostNotAllowed(InvalidRequest):
    """HTTP only: the request is for a host name that is not this gateway's."""


class CrossSiteRequest(InvalidRequest):
    """HTTP only: a browser sent the request for a page of another site."""


class TooManyUnfinishedHeads(Overloaded):
    """HTTP only: the client's address has too many connections without a complete head."""


class ConnectionsFull(Unavailable):
    """HTTP only: the gateway has as many connections as it may have."""


class BodiesFull(Unavailable):
    """HTTP only: the bodies of requests in progress have as many bytes as they may have."""


class AccountBodiesFull(Overloaded):
    """HTTP only: the bodies of one account that are not prepared yet have as many bytes as they may have."""


_BUSY_TEXT = "Capacity temporarily exceeded, please try again."
"""Clients of Workers AI look for this sentence with code 3040."""

_HTTP_ONLY: dict[type[TandemError], tuple[int, int]] = {
    BodyTooLarge: (413, 3006),
    BodyMissing: (400, 3003),
    HeaderMissing: (400, 3003),
    NoSuchRoute: (404, 7003),
    MethodNotAllowed: (405, 7001),
    MalformedRequest: (400, 7003),
    HeadTooLarge: (431, 7003),
    UrlTooLong: (414, 7003),
    RequestTooSlow: (408, 3007),
    GatewayDraining: (503, 3040),
    HostNotAllowed: (403, 10000),
    CrossSiteRequest: (403, 10000),
    TooManyUnfinishedHeads: (429, 3040),
    ConnectionsFull: (503, 3040),
    BodiesFull: (503, 3040),
    AccountBodiesFull: (429, 3040),
    NotAllowed: (403, 10000),
    NoSuchThing: (404, 7003),
    AlreadyThere: (409, 5006),
    LimitReached: (429, 3021),
}
"""By error class: HTTP status and Cloudflare's code. Goes before `_CLOUDFLARE`."""

_DOCUMENTED = {3021: 3036}
"""Codes that a Cloudflare Worker gets instead: its client derives the status from documented codes only."""

_CLOUDFLARE: dict[pb.ErrorCode.ValueType, tuple[int, int]] = {
    pb.ERROR_CODE_MODEL_NOT_FOUND: (400, 5007),
    pb.ERROR_CODE_INVALID_REQUEST: (400, 5006),
    pb.ERROR_CODE_CONTEXT_TOO_LONG: (400, 5006),
    pb.ERROR_CODE_UNSUPPORTED: (400, 5006),
    pb.ERROR_CODE_UNAUTHENTICATED: (401, 10000),
    pb.ERROR_CODE_OVERLOADED: (429, 3040),
    pb.ERROR_CODE_DRAINING: (429, 3040),
    pb.ERROR_CODE_UNAVAILABLE: (503, 3040),
    pb.ERROR_CODE_FINGERPRINT_MISMATCH: (503, 3040),
    pb.ERROR_CODE_STALE_INCARNATION: (503, 3040),
    pb.ERROR_CODE_KV_NOT_FOUND: (503, 3040),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: (408, 3007),
    pb.ERROR_CODE_CANCELLED: (499, 3008),
    pb.ERROR_CODE_ABORTED: (500, 3008),
}
_CLOUDFLARE_INTERNAL = (500, 3043)

_OPENAI: dict[pb.ErrorCode.ValueType, tuple[str, str | None]] = {
    pb.ERROR_CODE_MODEL_NOT_FOUND: ("invalid_request_error", "model_not_found"),
    pb.ERROR_CODE_INVALID_REQUEST: ("invalid_request_error", None),
    pb.ERROR_CODE_CONTEXT_TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    pb.ERROR_CODE_UNSUPPORTED: ("invalid_request_error", "unsupported_parameter"),
    pb.ERROR_CODE_UNAUTHENTICATED: ("invalid_request_error", "invalid_api_key"),
    pb.ERROR_CODE_OVERLOADED: ("rate_limit_error", "overloaded"),
    pb.ERROR_CODE_DRAINING: ("rate_limit_error", "draining"),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: ("timeout_error", "deadline_exceeded"),
}


_ENVELOPED = (
    "/client/v4/",
    "/ai-api/",
    "/to-everything/",
    "/autorag/",
    "/ai-gateway/gateways/",
    "/ai-gateway/universal/",
)
"""Prefixes of paths with Cloudflare's envelope. Binding calls other than `run` read only errors[0].message."""


def error_format_of(path: str) -> ErrorFormat:
    if path.startswith(_ENVELOPED):
        return "cloudflare"
    return "binding" if path == "/run" or path.startswith("/ai-gateway/") else "openai"


def error_response(request: Request, error: TandemError) -> Response:
    """Return the HTTP response for `error`, in the format of the request's endpoint."""
    status, body, headers = error_answer(error_format_of(request.url.path), error, request.state.request_id)
    return JSONResponse(body, status_code=status, headers=headers)


def error_answer(
    error_format: ErrorFormat, error: TandemError, request_id: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of the response for `error`."""
    body = error_body(error_format, error, request_id)
    return _status(error_format, error), body, _retry_headers(error_format, error)


def error_event(error_format: ErrorFormat, error: TandemError, request_id: str) -> dict[str, Any]:
    """Return the last event of a failed stream. The caller then closes the connection without [DONE]."""
    body = error_body(error_format, error, request_id)
    if error_format == "cloudflare":  # SDKs look for `error` in an event, and for `errors` everywhere else
        body = {**error_body("openai", error, request_id), "errors": body["errors"], "success": False}
    if error_format == "binding":
        body = {"error": body}
    return body


def error_body(error_format: ErrorFormat, error: TandemError, request_id: str) -> dict[str, Any]:
    message = public_message(error)
    code, text = _cloudflare_code(error), _cloudflare_text(error, message)
    if error_format == "cloudflare":
        is_routing = isinstance(error, NoSuchRoute | MethodNotAllowed | NoSuchThing | AlreadyThere) or code == 10000
        shown = text if is_routing else f"AiError: AiError: {text} ({request_id})"
        result: dict[str, Any] | None = None if is_routing else {}
        return {"result": result, "success": False, "errors": [{"code": code, "message": shown}], "messages": []}
    if error_format == "binding":
        code = _DOCUMENTED.get(code, code)
        shown = f"AiError: {text} ({request_id})"
        return {"internalCode": code, "name": "InferenceUpstreamError", "message": shown, "description": text}
    kind, openai_code = _OPENAI.get(error.code, ("server_error", None))
    if isinstance(error, LimitReached):
        openai_code = "rate_limit_exceeded"
    return {"error": {"message": message, "type": kind, "param": error.field or None, "code": openai_code}}


def public_message(error: TandemError) -> str:
    """Return what a client may read of an error.

    Errors that are not about the request can come from any process of the fleet. One that names an address, a worker
    or gRPC's status becomes a sentence without them; the log has the original.
    """
    if isinstance(error, InvalidRequest) or not _PRIVATE.search(error.message):
        return _shortened(error.message)
    if error.http_status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "the model's workers cannot take the request now; try again"
    if error.http_status == HTTPStatus.GATEWAY_TIMEOUT:
        return "the request took longer than its deadline; request fewer tokens or more time"
    return "the request failed in the fleet; the server's log has the details under the request's id"


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else message[:_MAX_MESSAGE_CHARACTERS] + "..."


_MAX_MESSAGE_CHARACTERS = 2_000
"""More can only be an echo of what the client sent."""

_PRIVATE = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}"  # an IPv4 address
    r"|\[[0-9a-fA-F]*:[0-9a-fA-F:.]*\]"  # an IPv6 address
    r"|\b[\w.-]+:\d{2,5}\b"  # a name with a port
    r"|\b(?:ipv4|ipv6|unix|dns):"
    r"|\b(?:worker|incarnation|reader) [\w.:/-]*[-\d][\w.:/-]*"
    r"|(?:^|[\s'\"(])/\w+/\w"  # a path
    rf"|\b(?:{'|'.join(status.name for status in grpc.StatusCode)}):"
)


class _Refusals:
    """Logs refusals with 429, a line a second of each kind: hundreds may come when the processor is needed most."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        """Since the last line."""
        self._logged_at: dict[str, float] = {}

    def note(self, request: Request, error: TandemError) -> None:
        kind, now = type(error).__name__, time.monotonic()
        self._num[kind] += 1
        if now - self._logged_at.get(kind, -math.inf) < _SECONDS_PER_LINE:
            return
        self._logged_at[kind] = now
        num = self._num.pop(kind)
        log.warning("request_refused", route=name_of(request.scope), kind=kind, error=error.log_text, num=num)


_REFUSALS = _Refusals()


async def on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    if isinstance(error, Overloaded) and not isinstance(error, Draining):
        _REFUSALS.note(request, error)
    elif not isinstance(error, InvalidRequest | Cancelled):
        log.warning("request_failed", route=name_of(request.scope), kind=type(error).__name__, error=error.log_text)
    return error_response(request, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Return routing errors (404, 405) in the format of the request's endpoint."""
    assert isinstance(error, HTTPException)
    response = error_response(request, _routing_error(request, error))
    response.headers.update(error.headers or {})
    return response


async def on_client_left(request: Request, error: Exception) -> Response:
    """Answer a request whose client closed the connection while sending the body. Nobody reads this answer."""
    return error_response(request, Cancelled("the client closed the connection before its request was complete"))


def unhandled_exception_response(request: Request, error: Exception) -> Response:
    """Return a 500 for an exception that no handler expects, and log the traceback."""
    log.error("unhandled_exception", route=name_of(request.scope), exc_info=error)
    answer = InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
    if has_work(error):
        note_work(answer)
    return error_response(request, answer)


def _routing_error(request: Request, error: HTTPException) -> TandemError:
    what = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NoSuchRoute(f"no route for {what}; see / for the list of endpoints")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{what} is not supported; allowed: {(error.headers or {}).get('Allow', 'nothing')}")
    return InvalidRequest(f"{what}: {error.detail}")


def _status(error_format: ErrorFormat, error: TandemError) -> int:
    if type(error) in _HTTP_ONLY:
        return _HTTP_ONLY[type(error)][0]
    return error.http_status if error_format == "openai" else _CLOUDFLARE.get(error.code, _CLOUDFLARE_INTERNAL)[0]


def _cloudflare_code(error: TandemError) -> int:
    return (_HTTP_ONLY.get(type(error)) or _CLOUDFLARE.get(error.code, _CLOUDFLARE_INTERNAL))[1]


def _cloudflare_text(error: TandemError, message: str) -> str:
    return f"{_BUSY_TEXT} ({message})" if _cloudflare_code(error) == 3040 else message


def _retry_headers(error_format: ErrorFormat, error: TandemError) -> dict[str, str]:
    # OpenAI's and Cloudflare's SDKs repeat 408, 409, 429 and all from 500 on, silently, unless this header forbids it.
    # A repeated request would do, and bill, its work again; one whose time is over has had all the time it asked for.
    if isinstance(error, Aborted | DeadlineExceeded) or has_work(error):
        return {"x-should-retry": "false"}
    if _status(error_format, error) not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds or 1)))}
