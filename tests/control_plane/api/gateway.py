"""Starts a real gateway for tests: uvicorn on port 0, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from control_plane.accounts.service import Accounts
from control_plane.api.http.connections import ConnectionLimits, Connections
from control_plane.api.http.request_context import HttpSettings
from control_plane.api.http.server import listen_longer, server_config
from control_plane.app import create_app
from control_plane.drain import Drain
from control_plane.explain.requests import Requests
from control_plane.explain.store import ExplanationStore
from control_plane.generation import EncodingDispatcher
from control_plane.request_metrics import RequestMetrics
from control_plane.text.early_refusals import Door
from control_plane.text.text_service import Preparer, TextService
from tests.control_plane.api.model import OneModel, description
from tests.control_plane.api.scripted_dispatcher import ScriptedDispatcher, workers


class Fleet:
    async def workers_body(self) -> bytes:
        return json.dumps({"object": "list", "data": workers()}).encode()

    def metrics_targets(self) -> list[dict[str, Any]]:
        labels = {"__scheme__": "http", "role": "decode", "worker": "decode-1", "host_id": "host-1"}
        return [{"targets": ["127.0.0.1:9100"], "labels": labels}]


class Ready:
    def __init__(self) -> None:
        self.answer: tuple[bool, dict[str, Any]] = (True, {"last_success_seconds_ago": 1.0})
        self.models: list[str] = []
        """Which models were asked for; "" for the gateway."""

    async def check(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        self.models.append(model)
        return self.answer


@dataclass
class Gateway:
    url: str
    dispatcher: ScriptedDispatcher
    readiness: Ready
    client: httpx.AsyncClient
    connections: Connections


@asynccontextmanager
async def serve(
    dispatcher: ScriptedDispatcher | None = None,
    *,
    timeout_seconds: float = 60.0,
    settings: HttpSettings | None = None,
    accounts: Accounts | None = None,
    listener: socket.socket | None = None,
    limits: ConnectionLimits | None = None,
    preparer: Preparer | None = None,
    strict_fields: bool = False,
    encoders: EncodingDispatcher | None = None,
    forwarded_allow_ips: Sequence[str] = (),
    requests: Requests | None = None,
    explanations: ExplanationStore | None = None,
    drain: Drain | None = None,
    priority_accounts: Sequence[str] = (),
    door: Door | None = None,
    **model_changes: object,
) -> AsyncIterator[Gateway]:
    """Serve the small model with `dispatcher` in place of workers."""
    dispatcher, readiness = dispatcher or ScriptedDispatcher(), Ready()
    catalog = OneModel(description(**model_changes))
    meter = accounts.metering if accounts else None
    requests = requests or Requests()
    request_metrics = RequestMetrics(requests)
    requests.listen(request_metrics.ended)
    requests.listen_to_first_tokens(request_metrics.first_token_left)
    text = TextService(
        catalog,
        dispatcher,
        default_timeout_seconds=timeout_seconds,
        meter=meter,
        preparer=preparer,
        strict_fields=strict_fields,
        encoders=encoders,
        requests=requests,
        priority_accounts=priority_accounts,
        door=door,
    )
    app = create_app(
        text, catalog, Fleet(), readiness, settings or HttpSettings(), accounts, explanations=explanations, drain=drain
    )
    if listener is None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # as the gateway's own
        listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    connections = Connections(limits or ConnectionLimits())
    config = server_config(app, connections, forwarded_allow_ips=forwarded_allow_ips, log_level="error")
    server = await _started(config, listener)
    url = "http://{}:{}".format(*listener.getsockname())
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
            yield Gateway(url, dispatcher, readiness, client, connections)
    finally:
        for socket_server in server.servers:
            socket_server.close()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


async def _started(config: uvicorn.Config, listener: socket.socket) -> uvicorn.Server:
    """Start uvicorn without the main loop of its own, whose ticks would cost each test 0.2 s."""
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    listen_longer([listener])
    return server
