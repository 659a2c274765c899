"""Reads `page` and `per_page`, and cuts lists into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from control_plane.api.http.bounds import MAX_PER_PAGE, MAX_SHOWN_CHARACTERS
from tandem_runtime.errors import InvalidRequest

T = TypeVar("T")


def page_of(request: Request, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
    """Return the requested page and Cloudflare's `result_info`. A page past the end is empty."""
    page = number(request, "page", default=1, highest=10**9)
    per_page = number(request, "per_page", default=50, highest=MAX_PER_PAGE)
    shown = items[(page - 1) * per_page : page * per_page]
    total = len(items)
    pages = -(-total // per_page)
    counts: dict[str, Any] = {"count": len(shown), "total_count": total, "total_pages": pages}
    return shown, {"page": page, "per_page": per_page, **counts}


def number(request: Request, name: str, *, default: int, highest: int) -> int:
    """Return a query parameter that is a number from 1 to `highest`. Raise InvalidRequest for anything else."""
    text = request.query_params.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(highest)) and 1 <= int(text) <= highest):
        shown = text[:MAX_SHOWN_CHARACTERS]
        raise InvalidRequest(f"{name} is {shown!r}, must be a number from 1 to {highest:,}", field=name)
    return int(text)
