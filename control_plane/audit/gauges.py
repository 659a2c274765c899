"""Which figures of the audits does a metrics backend get?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Observation

from tandem_runtime import metrics

if TYPE_CHECKING:
    from control_plane.audit.auditor import AuditReport


def export(report: Callable[[], AuditReport]) -> None:
    """Offer the last audit's figures; free where no endpoint is configured. Called on the exporter's thread."""
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

    meter.create_observable_gauge("tandem.kv.orphan_bytes", [orphans], "By", "KV bytes kept that nobody has a use for.")
    meter.create_observable_gauge(
        "tandem.kv.audit.unanswered", [unanswered], "{service}", "Services that did not answer the last audit."
    )
    meter.create_observable_gauge(
        "tandem.kv.audit.left_out", [left_out], "{row}", "Rows that were too many for the last audit's tables."
    )
