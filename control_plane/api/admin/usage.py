"""Endpoints that report usage to an account and to the operator."""

from __future__ import annotations

from datetime import date

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.accounts.usage import Period, UsageReport, today
from control_plane.api.http.bounds import (
    MAX_ACCOUNT_CHARACTERS,
    MAX_MODEL_CHARACTERS,
    MAX_PER_PAGE,
    MAX_SHOWN_CHARACTERS,
)
from control_plane.api.http.paging import number
from control_plane.api.http.request_context import check_name
from tandem_runtime.errors import InvalidRequest

_DEFAULT_DAYS = 30


class UsageEndpoints:
    """GET .../ai/usage for one account, GET /admin/usage for all."""

    def __init__(self, report: UsageReport) -> None:
        self._report = report

    def routes(self) -> list[Route]:
        return [
            Route("/client/v4/accounts/{account}/ai/usage", self.usage, methods=["GET"]),
            Route("/admin/usage", self.usage, methods=["GET"]),
        ]

    async def usage(self, request: Request) -> Response:
        """Answer a page of sums by day, account and model. `from` and `to` are days in UTC, both included."""
        last = _day(request, "to") or today()
        first = _day(request, "from") or date.fromordinal(max(1, last.toordinal() - _DEFAULT_DAYS + 1))
        if first > last:
            raise InvalidRequest(f"from is {first}, which is after to, {last}; exchange them", field="from")
        page = number(request, "page", default=1, highest=10**6)
        per_page = number(request, "per_page", default=100, highest=MAX_PER_PAGE)
        account = request.path_params.get("account") or request.query_params.get("account")
        model = request.query_params.get("model")
        for name, value, most in (
            ("account", account, MAX_ACCOUNT_CHARACTERS),
            ("model", model, MAX_MODEL_CHARACTERS),
        ):
            check_name(name, value or "", most)
        rows, total = await self._report.page(Period(first, last), account, model, (page - 1) * per_page, per_page)
        info = {"page": page, "per_page": per_page, "count": len(rows), "total_count": total}
        return JSONResponse({"result": rows, "success": True, "errors": [], "messages": [], "result_info": info})


def _day(request: Request, name: str) -> date | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        shown = text[:MAX_SHOWN_CHARACTERS]
        raise InvalidRequest(f"{name} is {shown!r}; give a day such as 2026-11-21", field=name) from error
