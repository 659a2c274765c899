"""Endpoints of the live page: the page, its files and the stream of changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.console.page_files import PageFile, PageFiles
from control_plane.api.http.errors import NoSuchRoute
from control_plane.api.http.request_context import served_models, services_of
from control_plane.api.http.sse import EventStream
from tandem_runtime.errors import Unavailable

_PLACE = re.compile(r"{(version|url|model|serving)}")
_PING_SECONDS = 10.0
"""After so long a silence a comment is sent: the page takes 25 s of silence for a lost gateway."""
FILES_PATH = "/ui/{version}/{name:path}"


def routes() -> list[Route]:
    return [
        Route("/", page, methods=["GET"]),
        Route(FILES_PATH, page_file, methods=["GET"]),
        Route("/v1/live", live, methods=["GET"]),
    ]


async def page(request: Request) -> Response:
    """Answer the live page. Without JavaScript, it says what Tandem is, what it serves, and how to call it."""
    return _page(str(request.base_url).rstrip("/"), tuple(served_models(request))).answer(request)


async def page_file(request: Request) -> Response:
    """Answer one file of the page: a script, the style sheet, a library's licence."""
    answer = _files().answer(request, request.path_params["version"], request.path_params["name"])
    if answer is None:
        raise NoSuchRoute("the page has no file of this name; reload the page", field="path")
    return answer


async def live(request: Request) -> Response:
    """Answer the stream of changes: fleet, requests, cache, events (`control_plane/live/feed.py` lists them)."""
    feed = services_of(request).live
    if feed is None:
        raise Unavailable("this gateway has no live page; ask for the list of workers instead")
    viewer = feed.join()

    async def close() -> None:
        feed.leave(viewer)

    return EventStream(request, viewer.frames(), close, ping_seconds=_PING_SECONDS)


def page_text(url: str, models: Sequence[str]) -> str:
    """Return the page for a gateway at `url` that serves `models`."""
    names = ", ".join(f"<b>{escape(model)}</b>" for model in models)
    serving = f"Serving {names}." if models else "No model is being served yet."
    values = {
        "version": _files().version,
        "url": escape(url),
        "model": escape(models[0] if models else "@tandem/demo"),
        "serving": serving,
    }
    return _PLACE.sub(lambda place: values[place[1]], _files().index)


@lru_cache(maxsize=16)
def _page(url: str, models: tuple[str, ...]) -> PageFile:
    """Return the page, compressed once for all who ask: most ask for the same gateway by one name."""
    return PageFile.of(page_text(url, models).encode(), "text/html; charset=utf-8")


@cache
def _files() -> PageFiles:
    return PageFiles()
