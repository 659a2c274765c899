"""Exports the results of audits as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from control_plane.audit.auditor import AuditReport
from tandem_runtime import metrics


def export(report: Callable[[], AuditReport]) -> None:
    """Export the last audit's results. The callbacks run on the exporter's thread."""
    meter = metrics.meter()

    def orphans(options: CallbackOptions) -> Iterable[Observation]:
        counted = report().by_service_and_kind()
        if not counted:
            yield Observation(0)
        for (service, kind), num_bytes in counted.items():
            yield Observation(num_bytes, {"service": service, "kind": kind})

    def unanswered(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(len(report().unanswered))

    def left_out(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(report().num_left_out)

    meter.create_observable_gauge("tandem.kv.orphan_bytes", [orphans], "By", "KV bytes that are kept without need.")
    meter.create_observable_gauge(
        "tandem.kv.audit.unanswered", [unanswered], "{service}", "Services that did not answer the last audit."
    )
    meter.create_observable_gauge(
        "tandem.kv.audit.left_out", [left_out], "{row}", "Rows beyond the maximum of the last audit's tables."
    )
