"""Reads a stream as a client does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

MODEL = "@tandem/demo"


@asynccontextmanager
async def client(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=limits) as http:
        yield http


async def run(http: httpx.AsyncClient, inputs: dict[str, Any], model: str = MODEL) -> dict[str, Any]:
    """Return the result of a call that is not streamed."""
    response = await http.post(f"/client/v4/accounts/test/ai/run/{model}", json=inputs)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["result"]
    return result


async def stream(
    http: httpx.AsyncClient, inputs: dict[str, Any], model: str = MODEL, leave_after: int | None = None
) -> list[dict[str, Any]]:
    """Return a stream's events up to [DONE], which must come; or leave, as a client does, after some."""
    events: list[dict[str, Any]] = []
    body = {**inputs, "stream": True}
    async with http.stream("POST", f"/client/v4/accounts/test/ai/run/{model}", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if leave_after is not None and len(events) >= leave_after:
                return events
            if line == "data: [DONE]":
                return events
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                assert "errors" not in events[-1] and "error" not in events[-1], events[-1]
    raise AssertionError(f"the stream ended without [DONE] after {len(events)} events")


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("response", "") for event in events)
