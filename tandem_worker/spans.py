"""Which spans does a worker add to a request's trace, once a phase of it is over?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.v1 import types_pb2 as pb
from tandem_runtime.tracing import record_span
from tandem_worker.requests import ActiveRequest

Attributes = dict[str, str | int]


@dataclass(frozen=True)
class Phase:
    """A span between two moments of a ledger (Unix nanoseconds; a phase that lacks one did not happen)."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes


class PhaseSpans:
    """Records the phases that `split` reads off a finished ledger, as children of the gateway's span."""

    def __init__(self, split: Callable[[pb.PhaseLedger], Iterable[Phase]]) -> None:
        self._split = split

    def record(self, request: ActiveRequest) -> None:
        traceparent = request.submit.traceparent
        if not traceparent:
            return
        request_id = request.submit.request_id
        for phase in self._split(request.ledger):
            if phase.start_ns and phase.end_ns:
                end_ns = max(phase.start_ns, phase.end_ns)
                attributes = {"tandem.request.id": request_id, **phase.attributes}
                record_span(phase.name, traceparent, phase.start_ns, end_ns, attributes)
