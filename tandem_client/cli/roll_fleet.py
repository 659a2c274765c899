"""What a roll asks and tells the gateway, over its HTTP API."""

from __future__ import annotations

import contextlib
from urllib.parse import quote

import httpx

from tandem_client.cli.fleet import FleetMember, ask, parse_fleet
from tandem_client.cli.rolling import RollFailed

_PROBE_SECONDS = 30.0
"""More than a probe takes at most."""


class GatewayFleet:
    """Implements rolling.Fleet. A gateway that is away for a moment is asked again by the roll."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def members(self) -> list[FleetMember]:
        answer = await ask(self._client, "/v1/workers")
        return parse_fleet(answer.json()) if answer is not None and answer.is_success else []

    async def probe(self, worker_id: str) -> str:
        try:
            answer = await self._client.post(f"/v1/workers/{quote(worker_id, safe='')}/probe", timeout=_PROBE_SECONDS)
        except httpx.TransportError as error:
            return f"the gateway does not answer: {error}"
        if not answer.is_success:
            return f"the gateway refuses to probe it: {_message(answer)}"
        result = answer.json()
        return "" if result.get("proven") else str(result.get("reason") or "the gateway gives no reason")

    async def drain(self, worker_id: str, *, resume: bool = False) -> None:
        what = "resume" if resume else "drain"
        try:
            answer = await self._client.post(f"/v1/workers/{quote(worker_id, safe='')}/{what}", timeout=_PROBE_SECONDS)
        except httpx.TransportError as error:
            raise RollFailed(f"the gateway does not answer: {error}") from error
        if not answer.is_success:
            raise RollFailed(f"the gateway cannot {what} {worker_id}: {_message(answer)}")

    async def report(self, state: str, **facts: object) -> None:
        with contextlib.suppress(httpx.TransportError):  # the terminal has the same
            await self._client.post("/v1/rolls", json={"state": state, **facts})


def _message(answer: httpx.Response) -> str:
    """Return the error's text of an answer; its status if there is none."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
