"""Receives the binding's calls from wrangler and miniflare, whose dev servers run `env.AI` remotely.

Both send the calls to one address and name the call's own URL in a header:

wrangler up to 4.40     X-Forwarded: https://workers-binding.ai/run?version=3
miniflare               MF-URL: the same; the call's headers as MF-Header-<name>; miniflare first tries a WebSocket and
                        works without one
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from control_plane.api.http.errors import HeaderMissing, error_response, on_http_exception
from tandem_runtime.errors import InvalidRequest, TandemError

PATH = "/client/v4/accounts/{account}/ai/run/proxy"
_BINDING = ("/run", "/ai-gateway/", "/ai-api/", "/to-everything/", "/autorag/")
_MINIFLARE_HEADER = b"mf-header-"


def routes() -> list[Route]:
    """Return the proxy's routes. They go before `/ai/run/{model}`, which also matches their path."""
    return [Route(path, RemoteProxy(), methods=["GET", "POST"]) for path in (PATH, f"{PATH}/")]


class RemoteProxy:
    """Routes a proxied call again, as the call that it carries; an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if Headers(scope=scope).get("upgrade", "").lower() == "websocket":
            await Response(status_code=426)(scope, receive, send)
            return
        try:
            call = _carried_call(scope)
        except TandemError as error:
            await error_response(Request(scope, receive), error)(scope, receive, send)
            return
        try:
            await scope["app"].router(call, receive, send)
        except HTTPException as error:  # no such route; the answer's format is that of the carried call
            response = await on_http_exception(Request(call, receive), error)
            await response(call, receive, send)


def _carried_call(scope: Scope) -> Scope:
    """Return the scope of the call that was proxied. Raise InvalidRequest if it is not a call of the binding."""
    headers = Headers(scope=scope)
    target = headers.get("mf-url") or headers.get("x-forwarded")
    if not target:
        raise HeaderMissing(
            "the call's URL is missing: send X-Forwarded or MF-URL, as wrangler and miniflare do", field="x-forwarded"
        )
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise InvalidRequest(f"{target!r} is not a URL: {error}", field="x-forwarded") from error
    if not url.path.startswith(_BINDING):
        raise InvalidRequest(f"{target!r} is not a call of the AI binding", field="x-forwarded")
    return {
        **scope,
        "path": unquote(url.path),
        "raw_path": url.path.encode("ascii", "replace"),
        "query_string": url.query.encode("ascii", "replace"),
        "headers": _carried_headers(scope["headers"]),
        "path_params": {"account": scope["path_params"]["account"]},
    }


def _carried_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the carried call's own headers, then those of the outer request that it does not replace."""
    carried = [(name.removeprefix(_MINIFLARE_HEADER), value) for name, value in headers if _is_carried(name)]
    names = {name for name, _ in carried}
    return [*carried, *((name, value) for name, value in headers if not _is_carried(name) and name not in names)]


def _is_carried(name: bytes) -> bool:
    return name.startswith(_MINIFLARE_HEADER)
