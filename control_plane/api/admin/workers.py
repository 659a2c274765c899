"""Endpoints that drain, resume and probe a worker."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.fleet.draining import WorkerDrain
from control_plane.worker_probe import WorkerProbe
from tandem_runtime.errors import Unsupported


class WorkerEndpoints:
    def __init__(self, workers: WorkerDrain | None, probe: WorkerProbe | None = None) -> None:
        """Each is None for an application without a fleet."""
        self._workers = workers
        self._probe = probe

    def routes(self) -> list[Route]:
        return [
            Route("/v1/workers/{worker}/drain", self.drain, methods=["POST"]),
            Route("/v1/workers/{worker}/resume", self.resume, methods=["POST"]),
            Route("/v1/workers/{worker}/probe", self.probe, methods=["POST"]),
        ]

    async def drain(self, request: Request) -> Response:
        """Let a worker finish what runs and take nothing new. The process stays, and can be resumed."""
        return await self._answer(request, resume=False)

    async def resume(self, request: Request) -> Response:
        """Let a worker that was drained take requests again."""
        return await self._answer(request, resume=True)

    async def probe(self, request: Request) -> Response:
        """Send a small request through this worker, and say whether it came back whole."""
        if self._probe is None:
            raise Unsupported("this gateway has no fleet whose workers could be probed")
        probed = await self._probe.probe(request.path_params["worker"])
        answer = {
            "id": probed.worker.worker_id,
            "name": probed.name,
            "proven": probed.is_proven,
            "seconds": round(probed.seconds, 3),
            **({"reason": probed.reason} if probed.reason else {}),
            **({"partner": probed.partner} if probed.partner else {}),
        }
        return JSONResponse(answer)

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
