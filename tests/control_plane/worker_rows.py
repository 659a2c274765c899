"""Reads what GET /v1/workers would answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from control_plane.fleet.status import FleetStatus


async def worker_rows(status: FleetStatus) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(await status.workers_body())["data"]
    return rows


def rows_of(status: FleetStatus) -> list[dict[str, Any]]:
    """Return the same outside an event loop."""
    return asyncio.run(worker_rows(status))
