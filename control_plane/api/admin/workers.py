"""Endpoints that drain and resume a worker."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.fleet.draining import WorkerDrain
from tandem_runtime.errors import Unsupported


class WorkerEndpoints:
    def __init__(self, workers: WorkerDrain | None) -> None:
        """`workers`: None for an application without a fleet."""
        self._workers = workers

    def routes(self) -> list[Route]:
        return [
            Route("/v1/workers/{worker}/drain", self.drain, methods=["POST"]),
            Route("/v1/workers/{worker}/resume", self.resume, methods=["POST"]),
        ]

    async def drain(self, request: Request) -> Response:
        """Let a worker finish what runs and take nothing new. The process stays, and can be resumed."""
        return await self._answer(request, resume=False)

    async def resume(self, request: Request) -> Response:
        """Let a worker that was drained take requests again."""
        return await self._answer(request, resume=True)

    async def _answer(self, request: Request, *, resume: bool) -> Response:
        if self._workers is None:
            raise Unsupported("this gateway has no fleet whose workers could be drained")
        drained = await self._workers.drain(request.path_params["worker"], resume=resume)
        worker = drained.worker
        answer = {
            "id": worker.worker_id,
            "name": drained.name,
            "state": drained.state,
            "num_running": worker.load.num_running,
        }
        if consequence := self._workers.consequence(drained):
            answer["warning"] = consequence
        return JSONResponse(answer)
