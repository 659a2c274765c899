"""Names a request by method and route template, for traces, logs and the watchdog of the event loop.

A path may hold the names of an account and a model, as the caller wrote them; its template does not.
"""

from __future__ import annotations

from functools import lru_cache

from starlette.routing import Route
from starlette.types import Scope

UNMATCHED = "(no route)"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def method_of(scope: Scope) -> str:
    """Return the method, `_OTHER` for one that no endpoint has (OpenTelemetry's name for that)."""
    method: str = scope["method"]
    return method if method in _METHODS else "_OTHER"


def route_of(scope: Scope) -> str:
    """Return the template of the request's route, such as `/v1/chat/completions`."""
    known: str | None = scope.get("tandem.route")
    if known is None:
        app = scope.get("app")
        known = scope["tandem.route"] = UNMATCHED if app is None else _templates_of(app).template(scope["path"])
    return known


def name_of(scope: Scope) -> str:
    """Return method and route, such as `POST /v1/chat/completions`."""
    return f"{method_of(scope)} {route_of(scope)}"


class _Templates:
    """The templates of an application's routes: a look-up for paths without parameters, else their patterns in turn."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._exact = {route.path for route in routes if "{" not in route.path}
        self._patterns = {route.path: route.path_regex for route in routes if "{" in route.path}

    def template(self, path: str) -> str:
        if path in self._exact:
            return path
        found = (template for template, pattern in self._patterns.items() if pattern.match(path))
        return next(found, UNMATCHED)


@lru_cache(maxsize=4)
def _templates_of(app: object) -> _Templates:
    return _Templates(tuple(route for route in getattr(app, "routes", ()) if isinstance(route, Route)))
