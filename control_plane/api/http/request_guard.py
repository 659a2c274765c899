"""Refuses requests by their head alone: too long to be a client's, or sent by a browser for another site's page.

While the gateway listens on loopback only, `Host` must be a name of this machine: a page of another site whose name
points to 127.0.0.1 (DNS rebinding) could read answers otherwise. No answer has CORS headers, so a page of another site
cannot read one; a form or a simple `fetch` of such a page could still start work, and is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api.http.bounds import (
    MAX_PATH_CHARACTERS,
    MAX_QUERY_BYTES,
    MAX_SHOWN_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
)
from control_plane.api.http.errors import CrossSiteRequest, HostNotAllowed, UrlTooLong, on_tandem_error
from tandem_runtime.errors import InvalidRequest, TandemError

LOCAL_HOSTS = ("workers-binding.ai", "host.docker.internal", "host.containers.internal")
"""Names that clients on this machine use besides loopback's: of env.AI in workerd, and of this host in a container.
Nobody can point them elsewhere in public: the first is Cloudflare's, .internal is not delegated."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
_SIMPLE_TYPES = frozenset({"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Content types that a page of any site can send without asking first (CORS-safelisted, Fetch standard)."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestGuard:
    """A plain ASGI middleware inside RequestContext."""

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] | None) -> None:
        """`allowed_hosts`: names besides those of loopback; None if any `Host` is right."""
        self._app = app
        self._allowed_hosts = None if allowed_hosts is None else frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except TandemError as error:
                response = await on_tandem_error(Request(scope, receive), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        _check_lengths(scope)
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host:
            self._check_host(host)
        for name in ("authorization", "x-auth-key"):
            if len(headers.get(name, "")) > MAX_TOKEN_CHARACTERS:
                raise InvalidRequest(
                    f"the header {name} has {len(headers[name]):,} characters, the limit is {MAX_TOKEN_CHARACTERS:,}; "
                    "send a token",
                    field=name,
                )
        if scope["method"] not in _READING:
            _check_site(headers, host)

    def _check_host(self, host: str) -> None:
        shown = repr(host[:MAX_SHOWN_CHARACTERS])
        found = _HOST.fullmatch(host)
        if found is None:
            raise InvalidRequest(f"the header Host is {shown}, which is no host name; correct it", field="host")
        name = found.group(1).lower().rstrip(".")
        allowed = self._allowed_hosts
        if allowed is not None and not is_loopback_name(name) and not allowed & {name, "*"}:
            raise HostNotAllowed(
                f"the header Host is {shown}; this gateway answers only the names of this machine (localhost, "
                f"127.0.0.1); start it with --allowed-hosts {name[:MAX_SHOWN_CHARACTERS]} if that is a proxy of yours",
                field="host",
            )


def is_loopback_name(name: str) -> bool:
    """Return whether a host name, or an address, can only be this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_lengths(scope: Scope) -> None:
    for name, length, limit in (
        ("path", len(scope["path"]), MAX_PATH_CHARACTERS),
        ("query", len(scope["query_string"]), MAX_QUERY_BYTES),
    ):
        if length > limit:
            raise UrlTooLong(f"the URL's {name} has {length:,} characters, the limit is {limit:,}; shorten it")


def _check_site(headers: Headers, host: str) -> None:
    """Raise CrossSiteRequest for what a page of another site can send without the browser asking first."""
    if "authorization" in headers or "x-auth-key" in headers:  # no form can send these
        return
    if headers.get("content-type", "").partition(";")[0].strip().lower() not in _SIMPLE_TYPES:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_foreign = site not in ("same-origin", "none") if site is not None else _is_foreign(origin, host)
    if is_foreign:
        raise CrossSiteRequest(
            f"a browser sent this for a page of another site ({(origin or 'unknown')[:MAX_SHOWN_CHARACTERS]}), which "
            "cannot use this gateway; send the request from a server, as application/json or with a token",
            field="origin",
        )


def _is_foreign(origin: str | None, host: str) -> bool:
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True
