"""Counts what waits for room and what is refused, by model and class, and exports the counts.

Labels are bounded: models are ids of served models, classes and causes are names below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from opentelemetry.metrics import CallbackOptions, Observation

from control_plane.admission.service_classes import ServiceClass
from tandem_runtime import metrics

Cause = Literal["late", "max_waiting", "max_waiting_per_account", "batch", "waited"]
"""late: the predicted wait was beyond the budget. waited: no room came in time. The others are bounds of the room."""


class AdmissionCounts:
    """Written on the event loop, read in any thread: each value is replaced as a whole."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[str, int]] = Counter()
        self._predicted_seconds: dict[str, float] = {}
        self._refused: Counter[tuple[str, Cause]] = Counter()

    def entered(self, model_id: str, service_class: int, predicted_seconds: float | None) -> None:
        """A request waits; `predicted_seconds`: None if nothing is known."""
        self._waiting[model_id, service_class] += 1
        if predicted_seconds is not None:
            self._predicted_seconds[model_id] = predicted_seconds

    def left(self, model_id: str, service_class: int) -> None:
        self._waiting[model_id, service_class] -= 1

    def refused(self, model_id: str, cause: Cause) -> None:
        self._refused[model_id, cause] += 1

    def waiting(self, options: CallbackOptions) -> Iterator[Observation]:
        for (model_id, service_class), num in dict(self._waiting).items():
            yield Observation(num, {"model": model_id, "class": ServiceClass(service_class).name.lower()})

    def predicted(self, options: CallbackOptions) -> Iterator[Observation]:
        waiting: Counter[str] = Counter()
        for (model_id, _), num in dict(self._waiting).items():
            waiting[model_id] += num
        for model_id, seconds in dict(self._predicted_seconds).items():
            yield Observation(seconds if waiting[model_id] else 0.0, {"model": model_id})

    def refusals(self, options: CallbackOptions) -> Iterator[Observation]:
        for (model_id, cause), num in dict(self._refused).items():
            yield Observation(num, {"model": model_id, "cause": cause})


def export(counts: Sequence[AdmissionCounts], *num_granted: Callable[[], Mapping[str, int]]) -> None:
    """`counts`: of different models. `num_granted` return how many requests may be sent by grants, by model; they are
    called in any thread.
    """
    meter = metrics.meter()

    def granted(options: CallbackOptions) -> Iterable[Observation]:
        sums: Counter[str] = Counter()
        for granted_by_model in num_granted:
            sums.update(granted_by_model())
        return [Observation(num, {"model": model_id}) for model_id, num in sums.items()]

    meter.create_observable_gauge(
        "tandem.admission.granted",
        [granted],
        "{request}",
        "Requests that the last grants of the decode and encode workers leave this gateway.",
    )
    meter.create_observable_gauge(
        "tandem.admission.waiting",
        [each.waiting for each in counts],
        "{request}",
        "Requests that wait for room, by class.",
    )
    meter.create_observable_gauge(
        "tandem.admission.predicted_wait",
        [each.predicted for each in counts],
        "s",
        "Predicted wait of the request that began to wait last; 0 while none waits.",
    )
    meter.create_observable_counter(
        "tandem.admission.refusals",
        [each.refusals for each in counts],
        "{request}",
        "Requests refused for lack of room, by cause.",
    )
