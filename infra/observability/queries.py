"""Queries and legends that several dashboards share."""

from __future__ import annotations

from infra.observability.expressions import quantile
from infra.observability.panels import RATE, Query

PROCESS = "{{role}} {{worker}} {{instance}}"
WORKER = "{{role}} {{worker}}"
DEVICE = "{{host_id}} device {{device}}"

_PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def percentiles(histogram: str, labels: str, by: str = "model", legend: str = "{{model}}") -> list[Query]:
    """Return p50, p95 and p99 of a histogram, by a label; `labels` are matchers, with commas between them."""
    return [(quantile(q, histogram, labels, RATE, by), f"{name} {legend}") for q, name in _PERCENTILES]


def rate(counter: str, labels: str, by: str) -> str:
    return f"sum by ({by}) (rate({counter}{{{labels}}}[{RATE}]))"


def of_device(metric: str, by: str = "host_id, device") -> str:
    """Return a figure of each device once: workers that share a device export the same."""
    return f"max by ({by}) ({metric})"
