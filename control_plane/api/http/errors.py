"""In which words, codes and statuses does each face say that something went wrong?

path                     body
/client/v4/...           {result, success, errors: [{code, message}], messages}        Cloudflare's envelope
/ai-api/... and others   the same                                                      the binding's calls that read it
/run, /ai-gateway/run    {internalCode, name, message, description}                    what `env.AI.run` reads
anything else            {error: {message, type, param, code}}                         OpenAI
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
from control_plane.api.services import request_id_of
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Aborted, Cancelled, InternalError, InvalidRequest, TandemError, Unsupported
from tandem_runtime.log import get_logger

Face = Literal["openai", "cloudflare", "binding"]

log = get_logger(__name__)


class BodyTooLarge(InvalidRequest):
    """HTTP only: the body never became a request."""


class BodyMissing(InvalidRequest):
    """HTTP only: there is no body."""


class HeaderMissing(InvalidRequest):
    """HTTP only: a header that says what is asked for is not there."""


class NoLora(Unsupported):
    """HTTP only: Workers AI has a status of its own for it."""


class NoSuchRoute(InvalidRequest):
    """HTTP only: no endpoint has this path."""


class MethodNotAllowed(InvalidRequest):
    """HTTP only: the endpoint does not take this method."""


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
"""HTTP status and Cloudflare's code."""

_DOCUMENTED = {3021: 3036}
"""A Worker learns no status: its client takes that from the code, and knows only those that Cloudflare documents."""

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
"""Of the binding's calls all but `run` read errors[0].message and nothing else."""


def face_of(path: str) -> Face:
    if path.startswith(_ENVELOPED):
        return "cloudflare"
    return "binding" if path == "/run" or path.startswith("/ai-gateway/") else "openai"


def error_response(request: Request, error: TandemError) -> Response:
    """Return `error` in the shape of the face that the request came to."""
    face = face_of(request.url.path)
    body = error_body(face, error, request_id_of(request))
    return JSONResponse(body, status_code=_status(face, error), headers=_retry_headers(face, error))


def error_event(face: Face, error: TandemError, request_id: str) -> bytes:
    """Return the last event of a stream that failed; the connection is closed after it, without [DONE]."""
    body = error_body(face, error, request_id)
    if face == "cloudflare":  # SDKs look for `error` in an event, and for `errors` everywhere else
        body = {**error_body("openai", error, request_id), "errors": body["errors"], "success": False}
    if face == "binding":
        body = {"error": body}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(face: Face, error: TandemError, request_id: str) -> dict[str, Any]:
    code, text = _cloudflare_code(error), _cloudflare_text(error)
    if face == "cloudflare":
        is_routing = isinstance(error, NoSuchRoute | MethodNotAllowed | NoSuchThing | AlreadyThere) or code == 10000
        message = text if is_routing else f"AiError: AiError: {text} ({request_id})"
        result: dict[str, Any] | None = None if is_routing else {}
        return {"result": result, "success": False, "errors": [{"code": code, "message": message}], "messages": []}
    if face == "binding":
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
    """Say 404 and 405 in the face's own shape."""
    assert isinstance(error, HTTPException)
    response = error_response(request, _routing_error(request, error))
    response.headers.update(error.headers or {})
    return response


async def on_client_left(request: Request, error: Exception) -> Response:
    """The client closed the connection while it was sending its body: nobody reads this answer."""
    return error_response(request, Cancelled("the client closed the connection before its request was complete"))


def bug_response(request: Request, error: Exception) -> Response:
    """Answer for an exception that nobody expected, and log where it came from."""
    log.error("bug", path=request.url.path, exc_info=error)
    return error_response(request, InternalError(f"internal error ({type(error).__name__}); the server's log has more"))


def _routing_error(request: Request, error: HTTPException) -> TandemError:
    what = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NoSuchRoute(f"no route for {what}; see / for the endpoints there are")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{what} is not possible; allowed: {(error.headers or {}).get('Allow', 'nothing')}")
    return InvalidRequest(f"{what}: {error.detail}")


def _status(face: Face, error: TandemError) -> int:
    if type(error) in _HTTP_ONLY:
        return _HTTP_ONLY[type(error)][0]
    return error.http_status if face == "openai" else _CLOUDFLARE.get(error.code, _CLOUDFLARE_INTERNAL)[0]


def _cloudflare_code(error: TandemError) -> int:
    return (_HTTP_ONLY.get(type(error)) or _CLOUDFLARE.get(error.code, _CLOUDFLARE_INTERNAL))[1]


def _cloudflare_text(error: TandemError) -> str:
    return f"{_BUSY_TEXT} ({error.message})" if _cloudflare_code(error) == 3040 else error.message


def _retry_headers(face: Face, error: TandemError) -> dict[str, str]:
    if isinstance(error, Aborted):  # OpenAI's and Cloudflare's SDKs would try a 500 again
        return {"x-should-retry": "false"}
    if _status(face, error) not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds or 1)))}
