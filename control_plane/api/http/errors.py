"""Writes each error in the format that the request's endpoint uses.

path                     format       body
/client/v4/...           cloudflare   {result, success, errors: [{code, message}], messages}
/ai-api/... and others   cloudflare   the same; read by the binding's calls other than `run`
/run, /ai-gateway/run    binding      {internalCode, name, message, description}; read by `env.AI.run`
anything else            openai       {error: {message, type, param, code}}
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from control_plane.accounts.errors import AlreadyThere, LimitReached, NoSuchThing, NotAllowed
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Aborted, Cancelled, InternalError, InvalidRequest, TandemError, Unsupported
from tandem_runtime.log import get_logger

ErrorFormat = Literal["openai", "cloudflare", "binding"]

log = get_logger(__name__)


class BodyTooLarge(InvalidRequest):
    """HTTP only: the body is larger than the limit."""


class BodyMissing(InvalidRequest):
    """HTTP only: the request has no body."""


class HeaderMissing(InvalidRequest):
    """HTTP only: a required header is missing."""


class NoLora(Unsupported):
    """HTTP only: the request names a LoRA adapter; Workers AI has its own status for that."""


class NoSuchRoute(InvalidRequest):
    """HTTP only: no endpoint has this path."""


class MethodNotAllowed(InvalidRequest):
    """HTTP only: the endpoint does not support this method."""


_BUSY_TEXT = "Capacity temporarily exceeded, please try again."
"""Clients of Workers AI look for this sentence with code 3040."""

_HTTP_ONLY: dict[type[TandemError], tuple[int, int]] = {
    BodyTooLarge: (413, 3006),
    BodyMissing: (400, 3003),
    HeaderMissing: (400, 3003),
    NoLora: (405, 5005),
    NoSuchRoute: (404, 7003),
    MethodNotAllowed: (405, 7001),
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
    error_format = error_format_of(request.url.path)
    body = error_body(error_format, error, request.state.request_id)
    return JSONResponse(body, status_code=_status(error_format, error), headers=_retry_headers(error_format, error))


def error_event(error_format: ErrorFormat, error: TandemError, request_id: str) -> bytes:
    """Return the last event of a failed stream. The caller then closes the connection without [DONE]."""
    body = error_body(error_format, error, request_id)
    if error_format == "cloudflare":  # SDKs look for `error` in an event, and for `errors` everywhere else
        body = {**error_body("openai", error, request_id), "errors": body["errors"], "success": False}
    if error_format == "binding":
        body = {"error": body}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(error_format: ErrorFormat, error: TandemError, request_id: str) -> dict[str, Any]:
    code, text = _cloudflare_code(error), _cloudflare_text(error)
    if error_format == "cloudflare":
        is_routing = isinstance(error, NoSuchRoute | MethodNotAllowed | NoSuchThing | AlreadyThere) or code == 10000
        message = text if is_routing else f"AiError: AiError: {text} ({request_id})"
        result: dict[str, Any] | None = None if is_routing else {}
        return {"result": result, "success": False, "errors": [{"code": code, "message": message}], "messages": []}
    if error_format == "binding":
        code = _DOCUMENTED.get(code, code)
        message = f"AiError: {text} ({request_id})"
        return {"internalCode": code, "name": "InferenceUpstreamError", "message": message, "description": text}
    kind, openai_code = _OPENAI.get(error.code, ("server_error", None))
    if isinstance(error, LimitReached):
        openai_code = "rate_limit_exceeded"
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": openai_code}}


async def on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    if not isinstance(error, InvalidRequest | Cancelled):
        log.warning("request_failed", path=request.url.path, kind=type(error).__name__, error=error.message)
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
    log.error("unhandled_exception", path=request.url.path, exc_info=error)
    return error_response(
        request, InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
    )


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


def _cloudflare_text(error: TandemError) -> str:
    return f"{_BUSY_TEXT} ({error.message})" if _cloudflare_code(error) == 3040 else error.message


def _retry_headers(error_format: ErrorFormat, error: TandemError) -> dict[str, str]:
    if isinstance(error, Aborted):  # OpenAI's and Cloudflare's SDKs retry a 500 by default
        return {"x-should-retry": "false"}
    if _status(error_format, error) not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds or 1)))}
