"""Holds what endpoints work with, and gives each request its id, trace, duration and caller."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from uuid import uuid4

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.accounts.identity import Caller, Identity
from control_plane.accounts.prices import Price
from control_plane.admission.service_classes import HEADER_TIERS
from control_plane.api.http.bounds import MAX_ACCOUNT_CHARACTERS, MAX_SESSION_CHARACTERS
from control_plane.api.http.errors import unhandled_exception_response
from control_plane.api.http.route_names import method_of, name_of, route_of
from control_plane.explain.server_timing import server_timing
from control_plane.explain.timeline import Timeline
from control_plane.generation import ModelCatalog, ModelDescription
from control_plane.live.feed import LiveFeed
from control_plane.text.text_service import TextService
from tandem_runtime import metrics, tracing
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.loop_lag import name_task

_SESSION_HEADER = "x-session-affinity"
SERVICE_TIER_HEADER = "x-service-tier"
"""For bodies that have no field for the class: Workers AI's."""
EXPLAIN_HEADER = "x-tandem-explain"
"""`1`: the answer has the request's explanation."""
_SERVED_SECONDS = 1.0
_BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
"""Of the durations of HTTP requests, in seconds: those of OpenTelemetry's conventions, and more for streams."""


class Readiness(Protocol):
    async def check(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        """Return whether the gateway takes requests, or one model does, and details for the operator."""


class FleetView(Protocol):
    async def workers_body(self) -> bytes:
        """Return every worker with its state, load and memory, as the JSON text of a list."""

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Return where the metrics of each worker and KV service are, in the form of Prometheus' http_sd."""


@dataclass(frozen=True)
class HttpSettings:
    max_body_bytes: int = 10 * 1024 * 1024
    ping_seconds: float = 15.0
    """Seconds of silence on an OpenAI stream after which a comment is sent, so that proxies keep the connection."""
    operator_token: str = ""
    """The token with which `tandem up` reads `GET /v1/workers`; "" for none."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names besides loopback's that `Host` may have; None for any."""


@dataclass(frozen=True)
class Services:
    text: TextService
    catalog: ModelCatalog
    fleet: FleetView
    readiness: Readiness
    settings: HttpSettings
    price_of: Callable[[str], Price] | None = None
    """The price of a model, by the id that its worker serves; None without accounts."""
    served: ServedModels = field(default_factory=lambda: ServedModels())
    live: LiveFeed | None = None
    """Makes the stream of GET /v1/live; None: this gateway has no live page."""


class ServedModels:
    """What is told of the served models, prepared for all who ask.

    For pages that need no token, the catalogue is asked once a second, and not per request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._model_ids: tuple[str, ...] = ()
        self._read_at = -math.inf
        self._listed: list[ModelDescription] = []
        self._list = b""

    def listed(self, catalog: ModelCatalog, make: Callable[[Sequence[ModelDescription]], bytes]) -> bytes:
        """Return what `make` makes of the models, as before if all descriptions are those of before."""
        models = catalog.list()
        if len(models) != len(self._listed) or any(map(operator.is_not, models, self._listed)) or not self._list:
            self._listed, self._list = models, make(models)
        return self._list

    def of(self, catalog: ModelCatalog) -> tuple[str, ...]:
        if self._clock() - self._read_at >= _SERVED_SECONDS:
            self._model_ids = tuple(model.model_id for model in catalog.list())
            self._read_at = self._clock()
        return self._model_ids


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def served_models(request: Request) -> tuple[str, ...]:
    """Return the ids of the models that were served a moment ago."""
    services = services_of(request)
    return services.served.of(services.catalog)


def timeline_of(request: Request) -> Timeline:
    """Return the marks of when the request reached which point."""
    found: Timeline | None = getattr(request.state, "timeline", None)
    if found is None:  # a test without the middleware
        found = request.state.timeline = Timeline()
    return found


def request_id_of(request: Request) -> str:
    return cast(str, request.state.request_id)


def check_name(name: str, text: str, max_characters: int) -> None:
    """Raise InvalidRequest if `text` cannot be the name of an account or a model, before any database query."""
    if len(text) > max_characters or not text.isprintable():
        raise InvalidRequest(
            f"{name} is {text[:max_characters]!r}; a name has up to {max_characters} printable characters", field=name
        )


def caller_of(request: Request) -> Caller:
    """Return who calls. Raise InvalidRequest if the account's name is malformed."""
    identity = getattr(request.state, "identity", None) or Identity(request.path_params.get("account", "default"))
    check_name("account", identity.account, MAX_ACCOUNT_CHARACTERS)
    return Caller(
        request_id=request_id_of(request),
        account=identity.account,
        identity=identity,
        answer_headers=getattr(request.state, "answer_headers", {}),
        timeline=timeline_of(request),
        session_affinity=_session_of(request),
        service_tier=_service_tier_of(request),
    )


def _service_tier_of(request: Request) -> str:
    tier = request.headers.get(SERVICE_TIER_HEADER, "")
    if tier and tier not in HEADER_TIERS:
        raise InvalidRequest(
            f"the header {SERVICE_TIER_HEADER} must be one of {', '.join(HEADER_TIERS)}; leave it out for default",
            field=SERVICE_TIER_HEADER,
        )
    return tier


def _session_of(request: Request) -> str:
    session = request.headers.get(_SESSION_HEADER, "")
    if len(session) > MAX_SESSION_CHARACTERS:
        raise InvalidRequest(
            f"the header {_SESSION_HEADER} has {len(session):,} characters, the limit is {MAX_SESSION_CHARACTERS}; "
            "send a shorter id",
            field=_SESSION_HEADER,
        )
    return session


class RequestContext:
    """Gives each request an id, a server span, a timeline and a duration.

    Returns the id as `cf-ai-req-id` and `x-request-id`, and what is known of the durations as `Server-Timing`.

    This is a plain ASGI middleware, so that endpoints see the client's disconnect directly.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._durations = metrics.meter().create_histogram(
            "http.server.request.duration",
            unit="s",
            description="From the request's head to the response's last byte.",
            explicit_bucket_boundaries_advisory=_BOUNDARIES,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(uuid4())
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        headers = Headers(scope=scope)
        timeline = Timeline(state.get("head_read_at"), wants_explanation=headers.get(EXPLAIN_HEADER) in ("1", "true"))
        state["timeline"] = timeline
        starts = state.pop("response_starts", None)  # it refers to the scope: as a cycle both would stay for long
        exchange = _Exchange(request_id, send, timeline, starts)
        started = time.perf_counter()
        method, name = method_of(scope), name_of(scope)
        name_task(name)
        with tracing.span(
            name,
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": route_of(scope),
                "tandem.request_id": request_id,
            },
        ) as span:
            try:
                await self._app(scope, receive, exchange.send)
            except Exception as error:
                if exchange.has_started:  # too late for an error response: the server cuts the connection
                    raise
                await unhandled_exception_response(Request(scope, receive), error)(scope, receive, exchange.send)
            finally:
                timeline.left()
                span.set_attribute("http.response.status_code", exchange.status)
                if exchange.status >= 500:
                    span.set_status(trace.StatusCode.ERROR)
                labels: dict[str, Any] = {"http.request.method": method, "http.response.status_code": exchange.status}
                self._durations.record(time.perf_counter() - started, labels)


class _Exchange:
    """Forwards a response, adds the request's id and durations to its headers, and keeps its status."""

    def __init__(self, request_id: str, send: Send, timeline: Timeline, starts: Callable[[], None] | None) -> None:
        """`starts` is called before the response starts: the server then counts the body no longer."""
        self._request_id = request_id
        self._send = send
        self._timeline = timeline
        self._starts = starts
        self.status = 499
        """499 (client closed the request) until a response starts."""
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.has_started = True
            if self._starts is not None:
                self._starts()
            headers = MutableHeaders(scope=message)
            headers["cf-ai-req-id"] = self._request_id
            headers["x-request-id"] = self._request_id
            headers["server-timing"] = server_timing(self._timeline)
        await self._send(message)
