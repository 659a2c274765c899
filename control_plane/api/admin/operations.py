"""What does an operator ask: is it alive, is it ready, who works here, what is this?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from control_plane.api.admin.landing import landing_page
from control_plane.api.services import services_of


def routes() -> list[Route]:
    return [
        Route("/", landing, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/v1/workers", workers, methods=["GET"]),
    ]


async def healthz(request: Request) -> Response:
    """The process is alive; it may still be unable to serve."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """200 only after a request has really gone the whole way lately."""
    is_ready, details = await services_of(request).readiness.check()
    return JSONResponse({"ready": is_ready, **details}, status_code=200 if is_ready else 503)


async def workers(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": services_of(request).fleet.workers()})


async def landing(request: Request) -> Response:
    models = [model.model_id for model in services_of(request).catalog.list()]
    return HTMLResponse(landing_page(str(request.base_url).rstrip("/"), models))
