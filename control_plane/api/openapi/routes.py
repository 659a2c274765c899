"""Where are the document and the page made from it?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from control_plane.api.openapi.document import document
from control_plane.api.openapi.page import reference_page
from control_plane.api.services import services_of


def routes() -> list[Route]:
    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/docs", reference, methods=["GET"]),
    ]


async def openapi(request: Request) -> Response:
    return JSONResponse(_document(request))


async def reference(request: Request) -> Response:
    return HTMLResponse(reference_page(_document(request)))


def _document(request: Request) -> dict[str, object]:
    models = [model.model_id for model in services_of(request).catalog.list()]
    return document(str(request.base_url).rstrip("/"), models)
