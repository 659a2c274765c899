"""Endpoints for operators: liveness, readiness and the list of workers."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.http.request_context import Readiness, services_of
from control_plane.storage.database import Database


def routes() -> list[Route]:
    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/health", readyz, methods=["GET"]),
        Route("/ping", readyz, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/v1/workers", workers, methods=["GET"]),
    ]


async def healthz(request: Request) -> Response:
    """Answer 200: the process is alive. It may still be unable to serve."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Answer 200 once the gateway has seen its fleet and while any worker answers requests, else 503.

    With `?model=ID`: 200 only while requests for that model are answered: a recent one has passed prefill, hand-over
    and decode, or the last probe found its workers full.
    Models, ages and reasons are for the operator: only a token that opens GET /v1/workers shows them. Load generators
    and SageMaker ask /health and /ping before they begin: other servers answer there once they have loaded a model.
    """
    is_ready, details = await services_of(request).readiness.check(request.query_params.get("model", ""))
    shown = details if getattr(request.state, "may_see_workers", False) else {}
    return JSONResponse({**shown, "ready": is_ready}, status_code=200 if is_ready else 503)


async def version(request: Request) -> Response:
    """Answer the version of the installed package."""
    return JSONResponse({"version": importlib.metadata.version("tandem-serve")})


async def workers(request: Request) -> Response:
    return Response(await services_of(request).fleet.workers_body(), media_type="application/json")


@dataclass(frozen=True)
class ReadyWithDatabase:
    """Readiness of the gateway and its database. The heartbeat of the accounts keeps `database.problem` current."""

    others: Readiness
    database: Database

    async def check(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        is_ready, details = await self.others.check(model)
        if not self.database.problem:
            return is_ready, details
        return False, {**details, "ready": False, "reason": "the database cannot be used"}
