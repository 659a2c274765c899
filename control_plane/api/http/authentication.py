"""Checks that a request's token permits the request.

While no account exists, all endpoints but administration are open, as on a developer's machine.
"""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.accounts import tokens
from control_plane.accounts.authenticator import Authenticator
from control_plane.accounts.errors import NotAllowed
from control_plane.accounts.identity import Identity
from control_plane.api.http.errors import NoSuchRoute, on_tandem_error
from tandem_runtime.errors import TandemError, Unauthenticated

_OPEN = re.compile(r"/|/ui/.*|/healthz|/docs|/openapi\.json")
"""The page and its files hold no data: what the page shows, it asks for with the reader's token."""
_OPERATOR = re.compile(r"/v1/workers(/.*)?|/v1/rolls|/v1/events|/v1/live|/metrics|/v1/metrics/targets")
"""The fleet's state: for the operator's token and for administrators; open while no account exists."""
_REQUESTS = re.compile(r"/v1/requests(/.*)?")
"""The operator's token sees the requests of all accounts, as an administrator's does; another token its account's."""
_READINESS = frozenset({"/readyz", "/health", "/ping"})
"""Open, too; a token that may see workers sees the reasons."""
_ACCOUNT = re.compile(r"/client/v4/accounts/([^/]+)")
_ADMIN = re.compile(_OPERATOR.pattern + r"|/admin/.*|/client/v4/accounts/[^/]+/tokens(/.*)?")
_NOT_MODELS = re.compile(r"/admin.*|/client/v4/(?!accounts/[^/]+/ai(/|$)).*")
"""Paths that a token for inference never opens, future routes under these prefixes included."""
_ANY_TOKEN = re.compile(r"/client/v4/user/tokens/verify|/client/v4/accounts/[^/]+/tokens/verify")
_OWN = re.compile(r"/client/v4/accounts(/[^/]+)?")
_USAGE = re.compile(r"/client/v4/accounts/[^/]+/ai/usage")


def needed_scope(method: str, path: str) -> tokens.Scope | None:
    """Return the scope that a token needs for this path; None if any valid token is enough."""
    if _ANY_TOKEN.fullmatch(path) and method in ("GET", "HEAD"):
        return None
    if _OWN.fullmatch(path):
        return None if method in ("GET", "HEAD") else "admin"
    if _ADMIN.fullmatch(path) or _NOT_MODELS.fullmatch(path):
        return "admin"
    return "usage" if _USAGE.fullmatch(path) else "inference"


def _check_characters(path: str) -> None:
    """Raise NoSuchRoute for control characters: a route's `$` also matches before a last newline, our checks do not."""
    if any(character < " " or character == "\x7f" for character in path):
        raise NoSuchRoute(
            "the path has a control character, which no endpoint's path has; remove the character", field="path"
        )


def is_administration(path: str) -> bool:
    """Return whether the path is about accounts and tokens: closed even while no account exists."""
    is_about_them = _OWN.fullmatch(path) or _ADMIN.fullmatch(path) or _ANY_TOKEN.fullmatch(path)
    return bool(is_about_them) and not _OPERATOR.fullmatch(path)


class AuthenticationMiddleware:
    """Puts `identity` and `answer_headers` into the request's state, or answers 401, 403 or 503 itself.

    This is a plain ASGI middleware inside RequestContext. Headers that endpoints add to `answer_headers` before the
    response starts are sent with the response.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, operator_token: str = "") -> None:
        self._app = app
        self._authenticator = authenticator
        self._operator_token = operator_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        state = scope.setdefault("state", {})
        state["answer_headers"] = headers

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and headers:
                MutableHeaders(scope=message).update(headers)
            await send(message)

        try:
            _check_characters(scope["path"])
            if scope["path"] in _READINESS:
                state["may_see_workers"] = await self._may_see_workers(scope)
            elif not _OPEN.fullmatch(scope["path"]):
                state["identity"] = await self._identify(scope)
        except TandemError as error:
            if isinstance(error, Unauthenticated) and not isinstance(error, NotAllowed):
                headers["www-authenticate"] = "Bearer"
            response = await on_tandem_error(Request(scope, receive), error)
            await response(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    async def _identify(self, scope: Scope) -> Identity:
        path = scope["path"]
        named = _ACCOUNT.match(path)
        account = named.group(1) if named else None
        secret = bearer(Headers(scope=scope))
        if (_OPERATOR.fullmatch(path) or _REQUESTS.fullmatch(path)) and self._is_operator(secret):
            return Identity("")
        if await self._authenticator.is_open():
            if is_administration(path):
                raise NotAllowed(
                    "there is no account yet; create the first with `python -m control_plane account create NAME`, "
                    "which prints its token"
                )
            return Identity(account or "default")
        if not secret:
            raise Unauthenticated("the request needs an API token; send it as Authorization: Bearer tdm_...")
        return await self._authenticator.identify(secret, needed_scope(scope["method"], path), account)

    async def _may_see_workers(self, scope: Scope) -> bool:
        """Return whether the request's token opens the list of workers. Without a token, no database is asked."""
        secret = bearer(Headers(scope=scope))
        if not secret or self._is_operator(secret):
            return bool(secret)
        try:
            await self._authenticator.identify(secret, "admin", None)
        except TandemError:
            return False
        return True

    def _is_operator(self, secret: str) -> bool:
        return bool(self._operator_token) and hmac.compare_digest(secret.encode(), self._operator_token.encode())


def bearer(headers: Headers) -> str:
    """Return the request's token: a bearer token, else Cloudflare's older X-Auth-Key header; "" for none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else headers.get("x-auth-key", "").strip()
