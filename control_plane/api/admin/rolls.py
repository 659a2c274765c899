"""`POST /v1/rolls`: a supervisor that replaces workers tells what it does, for the events of the fleet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.http.body import Body, check, refuse_extras
from control_plane.api.http.body_reading import read_json_object
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_ROLL_NAME_CHARACTERS = 256
MAX_ROLL_REASON_CHARACTERS = 1_024
MAX_ROLL_WORKERS = 100_000


class RollBody(Body):
    state: Literal["started", "step", "finished", "rolled_back"]
    num_workers: int = Field(default=0, ge=0, le=MAX_ROLL_WORKERS)
    """Of the roll; of a step: how many are replaced."""
    worker: str = Field(default="", max_length=MAX_ROLL_NAME_CHARACTERS)
    """Of a step: the worker that was replaced."""
    to: str = Field(default="", max_length=MAX_ROLL_NAME_CHARACTERS)
    """Of a step: the worker in its place."""
    reason: str = Field(default="", max_length=MAX_ROLL_REASON_CHARACTERS)
    """Of a roll that was taken back."""


async def report_roll(request: Request) -> Response:
    """Log one line; the line is also an event of the fleet."""
    body = check(RollBody, await read_json_object(request))
    refuse_extras(body)
    if body.state == "started":
        log.info("roll_started", num_workers=body.num_workers)
    elif body.state == "step":
        log.info("roll_step", worker=body.worker, to=body.to, num_workers=body.num_workers)
    elif body.state == "finished":
        log.info("roll_finished", num_workers=body.num_workers)
    else:
        log.warning("roll_rolled_back", reason=body.reason)
    return JSONResponse({"object": "roll", "state": body.state})


ROUTE = Route("/v1/rolls", report_roll, methods=["POST"])
