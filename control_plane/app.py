"""Builds the ASGI application from its routes, middleware and services."""

from __future__ import annotations

from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from control_plane.accounts.service import Accounts
from control_plane.api.admin import metrics as metrics_endpoints
from control_plane.api.admin import operations, rolls
from control_plane.api.admin.accounts import Administration
from control_plane.api.admin.events import EventEndpoints
from control_plane.api.admin.usage import UsageEndpoints
from control_plane.api.admin.workers import WorkerEndpoints
from control_plane.api.console import routes as console
from control_plane.api.encoders import routes as encoders
from control_plane.api.http.authentication import AuthenticationMiddleware
from control_plane.api.http.drain_guard import DrainGuard
from control_plane.api.http.errors import on_client_left, on_http_exception, on_tandem_error
from control_plane.api.http.request_context import FleetView, HttpSettings, Readiness, RequestContext, Services
from control_plane.api.http.request_guard import RequestGuard
from control_plane.api.openai import routes as openai
from control_plane.api.openai import tokenization_routes
from control_plane.api.openapi import document as openapi
from control_plane.api.requests import RequestEndpoints
from control_plane.api.workers_ai import binding, remote_proxy
from control_plane.api.workers_ai import routes as workers_ai
from control_plane.drain import Drain
from control_plane.events.store import EventStore
from control_plane.explain.store import ExplanationStore
from control_plane.fleet.draining import WorkerDrain
from control_plane.generation import ModelCatalog
from control_plane.live.feed import LiveFeed
from control_plane.text.text_service import TextService
from control_plane.worker_probe import WorkerProbe
from tandem_runtime.errors import TandemError


def create_app(
    text: TextService,
    catalog: ModelCatalog,
    fleet: FleetView,
    readiness: Readiness,
    settings: HttpSettings,
    accounts: Accounts | None = None,
    live: LiveFeed | None = None,
    explanations: ExplanationStore | None = None,
    events: EventStore | None = None,
    workers: WorkerDrain | None = None,
    drain: Drain | None = None,
    probe: WorkerProbe | None = None,
) -> Starlette:
    """Return the ASGI application with all routes. Call after `tracing.configure` and `metrics.configure`.

    Without `accounts`, no token is required and there is no administration API. Changes one process-wide setting of
    sse-starlette: uvicorn's shutdown no longer cuts streams, because a draining gateway finishes its requests.
    """
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    app = Starlette(
        routes=[
            *console.routes(),
            *operations.routes(),
            *metrics_endpoints.routes(),
            *RequestEndpoints(explanations).routes(),
            *EventEndpoints(events).routes(),
            *WorkerEndpoints(workers, probe).routes(),
            rolls.ROUTE,
            *openai.routes("/v1"),
            *encoders.routes("/v1"),
            encoders.COHERE_ROUTE,
            *tokenization_routes.routes(),
            *openai.routes("/client/v4/accounts/{account}/ai/v1"),
            *encoders.routes("/client/v4/accounts/{account}/ai/v1"),
            *remote_proxy.routes(),
            *workers_ai.routes(),
            *binding.routes(),
            *openapi.routes(),
            *(Administration(accounts.store, accounts.authenticator).routes() if accounts else ()),
            *(UsageEndpoints(accounts.usage).routes() if accounts else ()),
        ],
        middleware=[
            Middleware(RequestContext),
            *([Middleware(DrainGuard, drain)] if drain is not None else []),
            Middleware(RequestGuard, settings.allowed_hosts if settings else None),
            *(
                [Middleware(AuthenticationMiddleware, accounts.authenticator, settings.operator_token)]
                if accounts
                else ()
            ),
        ],
        exception_handlers={
            TandemError: on_tandem_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_left,
        },
    )
    app.router.redirect_slashes = False
    if accounts is not None:
        readiness = operations.ReadyWithDatabase(readiness, accounts.database)
    price_of = accounts.metering.price_of if accounts else None
    app.state.services = Services(text, catalog, fleet, readiness, settings, price_of, live=live)
    return app
