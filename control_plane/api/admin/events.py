"""`GET /v1/events`: what the fleet decided and why."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.http.paging import number
from control_plane.api.http.request_context import check_name
from control_plane.events.kinds import KINDS, SEVERITIES
from control_plane.events.store import MAX_PAGE, EventStore, Wanted
from tandem_runtime.errors import InvalidRequest, Unsupported

_DEFAULT_EVENTS = 100
_MAX_NUMBER = 2**63 - 1
_MAX_WORKER_CHARACTERS = 128


class EventEndpoints:
    def __init__(self, store: EventStore | None) -> None:
        """`store`: None for an application without a database."""
        self._store = store

    def routes(self) -> list[Route]:
        return [Route("/v1/events", self.events, methods=["GET"])]

    async def events(self, request: Request) -> Response:
        """Answer the newest events, or with `after` the first ones after that number; the newest is the last."""
        if self._store is None:
            raise Unsupported("this gateway has no database, and keeps no events")
        query = request.query_params
        limit = number(request, "limit", default=_DEFAULT_EVENTS, highest=MAX_PAGE)
        wanted = Wanted(query.get("kind", ""), query.get("severity", ""), query.get("worker", ""))
        _check(wanted)
        if "after" in query:
            events = await self._store.after(_after(query["after"]), limit, wanted)
        else:
            events = await self._store.newest(limit, wanted)
        return JSONResponse({"object": "list", "data": [event.to_json() for event in events]})


def _check(wanted: Wanted) -> None:
    if wanted.kind and wanted.kind not in KINDS:
        raise InvalidRequest(f"kind is no kind of event; the kinds are {', '.join(KINDS)}", field="kind")
    if wanted.severity and wanted.severity not in SEVERITIES:
        raise InvalidRequest(f"severity is one of {', '.join(SEVERITIES)}", field="severity")
    check_name("worker", wanted.worker, _MAX_WORKER_CHARACTERS)


def _after(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20) or int(text) > _MAX_NUMBER:
        raise InvalidRequest("after is the id of an event, a whole number from 0", field="after")
    return int(text)
