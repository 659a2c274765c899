"""Shared by the exporters of spans and metrics: endpoint, resource and shutdown."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem_runtime.identity import new_incarnation

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

EXPORT_TIMEOUT_SECONDS = 3
SHUTDOWN_TIMEOUT_SECONDS = 5
"""A dead collector delays the end of a process by at most this long."""

_INSTANCE_ID = new_incarnation()


def endpoint_for(signal: str, configured: str | None) -> str | None:
    """Return the endpoint of `signal` ("traces", "metrics"): the setting, else OpenTelemetry's variables, else None."""
    specific = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return configured or specific or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def is_insecure(endpoint: str) -> bool:
    """Return True unless the endpoint is https."""
    return not endpoint.startswith("https://")


def resource(service: str, instance_id: str | None) -> Resource:
    """Describe this process: service.name, service.instance.id (its incarnation)."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": service, "service.instance.id": instance_id or _INSTANCE_ID})


def finish_within(finish: Callable[[], object], seconds: float) -> None:
    """Call `finish` in a thread and wait for it at most that long."""
    thread = threading.Thread(target=finish, name="otlp-shutdown", daemon=True)
    thread.start()
    thread.join(seconds)
