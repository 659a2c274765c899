"""Endpoints that list requests and explain one: an account sees its own, operators and administrators see all."""

from __future__ import annotations

from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.accounts.errors import NoSuchThing
from control_plane.accounts.identity import Identity
from control_plane.api.http.bounds import MAX_ACCOUNT_CHARACTERS, MAX_MODEL_CHARACTERS, MAX_SHOWN_CHARACTERS
from control_plane.api.http.paging import number
from control_plane.api.http.request_context import check_name, services_of
from control_plane.explain.explanation import State
from control_plane.explain.store import ExplanationStore, document_of
from tandem_runtime.errors import InvalidRequest

MAX_LISTED = 500
STATES: tuple[str, ...] = get_args(State)


class RequestEndpoints:
    """GET /v1/requests and GET /v1/requests/{id}/explain."""

    def __init__(self, store: ExplanationStore | None) -> None:
        """`store`: None if explanations are not kept; then those that run and the latest are shown."""
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/requests", self.list, methods=["GET"]),
            Route("/v1/requests/{request_id}/explain", self.explain, methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        """Answer the requests that run, then those that have ended, the newest first."""
        limit = number(request, "limit", default=50, highest=MAX_LISTED)
        wanted = _wanted(request)
        own = _own_account(request)
        if own is not None and wanted.setdefault("account", own) != own:
            return JSONResponse({"object": "list", "data": []})
        rows = {row.id: row.to_json() for row in services_of(request).text.requests.matching(limit, wanted)}
        if self._store is not None and len(rows) < limit and wanted.get("state") not in ("queued", "running"):
            for row in await self._store.newest(limit, wanted):
                rows.setdefault(row["id"], row)
        return JSONResponse({"object": "list", "data": sorted(rows.values(), key=_order)[:limit]})

    async def explain(self, request: Request) -> Response:
        """Answer the explanation. Raise NoSuchThing, also for a request of another account."""
        request_id, own = request.path_params["request_id"], _own_account(request)
        known = services_of(request).text.requests.find(request_id)
        document = None
        if known is not None:
            document = document_of(known) if own in (None, known.summary.account) else None
        elif self._store is not None:
            document = await self._store.find(request_id, own)
        if document is None:
            raise NoSuchThing(
                f"no request {request_id[:MAX_SHOWN_CHARACTERS]!r} is known; the id is in the answer's header "
                "x-request-id, and explanations are kept for --explain-hours"
            )
        return Response(document, media_type="application/json")


def _own_account(request: Request) -> str | None:
    """Return the only account whose requests the caller may see; None for all."""
    identity: Identity | None = getattr(request.state, "identity", None)
    return None if identity is None or identity.is_admin else identity.account


def _wanted(request: Request) -> dict[str, str]:
    """Return the filters of the query. Raise InvalidRequest."""
    found = {name: request.query_params.get(name, "") for name in ("account", "model", "state")}
    check_name("account", found["account"], MAX_ACCOUNT_CHARACTERS)
    check_name("model", found["model"], MAX_MODEL_CHARACTERS)
    if found["state"] and found["state"] not in STATES:
        shown = found["state"][:MAX_SHOWN_CHARACTERS]
        raise InvalidRequest(f"state is {shown!r}, must be one of {', '.join(STATES)}", field="state")
    return {name: value for name, value in found.items() if value}


def _order(row: dict[str, Any]) -> tuple[bool, int]:
    return row["state"] not in ("queued", "running"), -row["started_ms"]
