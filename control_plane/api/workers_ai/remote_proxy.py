"""How do wrangler and miniflare reach the binding, whose dev servers run `env.AI` remotely?

Both send the binding's calls to one address and say beside them where they were meant to go:

wrangler up to 4.40     X-Forwarded: https://workers-binding.ai/run?version=3
miniflare               MF-URL: the same; the call's headers as MF-Header-<name>; and it opens a WebSocket, which it can
                        do without
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api.http.errors import HeaderMissing, error_response
from tandem_runtime.errors import InvalidRequest, TandemError

PATH = "/client/v4/accounts/{account}/ai/run/proxy"
_PATH = re.compile(r"/client/v4/accounts/([^/]+)/ai/run/proxy/?")
_BINDING = ("/run", "/ai-gateway/", "/ai-api/", "/to-everything/", "/autorag/")
_MINIFLARE_HEADER = b"mf-header-"


class RemoteProxy:
    """Turns a proxied call into the call it was, before anything is routed; other requests pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxied = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if proxied is None:
            await self._app(scope, receive, send)
        elif Headers(scope=scope).get("upgrade", "").lower() == "websocket":
            await Response(status_code=426)(scope, receive, send)
        else:
            await self._forward(scope, proxied[1], receive, send)

    async def _forward(self, scope: Scope, account: str, receive: Receive, send: Send) -> None:
        try:
            scope = _unwrapped(scope, account)
        except TandemError as error:
            await error_response(Request(scope, receive), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _unwrapped(scope: Scope, account: str) -> Scope:
    """Return the scope of the call that was proxied; raises InvalidRequest if it is not one of the binding's."""
    headers = Headers(scope=scope)
    target = headers.get("mf-url") or headers.get("x-forwarded")
    if not target:
        raise HeaderMissing(
            "neither X-Forwarded nor MF-URL says which call this is; only wrangler and miniflare come here",
            field="x-forwarded",
        )
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise InvalidRequest(f"{target!r} is no URL: {error}", field="x-forwarded") from error
    if not url.path.startswith(_BINDING):
        raise InvalidRequest(f"{target!r} is no call of the AI binding", field="x-forwarded")
    return {
        **scope,
        "path": unquote(url.path),
        "raw_path": url.path.encode("ascii", "replace"),
        "query_string": url.query.encode("ascii", "replace"),
        "headers": _inner_headers(scope["headers"]),
        "path_params": {"account": account},
    }


def _inner_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the call's own headers, which go before those of the proxy's request."""
    inner = [(name.removeprefix(_MINIFLARE_HEADER), value) for name, value in headers if _is_inner(name)]
    named = {name for name, _ in inner}
    return [*inner, *((name, value) for name, value in headers if not _is_inner(name) and name not in named)]


def _is_inner(name: bytes) -> bool:
    return name.startswith(_MINIFLARE_HEADER)
