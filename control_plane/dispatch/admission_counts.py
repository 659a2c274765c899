"""Counts what waits for room and what is refused, by model and class; exports that, counters and grants.

Labels are bounded: models are ids of served models, classes and causes are names below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from control_plane.admission.service_classes import ServiceClass
from tandem_runtime import metrics
from tandem_runtime.virtual_counters import VirtualCounters

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


class Queue(Protocol):
    """Where requests wait."""

    counts: AdmissionCounts

    def counters(self) -> Iterable[tuple[str, int, VirtualCounters]]:
        """Return model, class and counters. Called in any thread."""


Granted = Mapping[tuple[str, str], int]
"""Requests that may be sent by the grants of workers, by model and role."""


def export(queues: Sequence[Queue], *num_granted: Callable[[], Granted]) -> None:
    """`queues`: of different models. `num_granted` are called in any thread."""
    meter = metrics.meter()
    counts = [queue.counts for queue in queues]

    def granted(options: CallbackOptions) -> Iterator[Observation]:
        for granted_by_role in num_granted:
            for (model_id, role), num in granted_by_role().items():
                yield Observation(num, {"model": model_id, "role": role})

    def of_counters(value: Callable[[VirtualCounters], float]) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observed(options: CallbackOptions) -> Iterator[Observation]:
            for queue in queues:
                for model_id, service_class, counters in queue.counters():
                    labels = {"model": model_id, "class": ServiceClass(service_class).name.lower()}
                    yield Observation(value(counters), labels)

        return observed

    meter.create_observable_gauge(
        "tandem.admission.granted",
        [granted],
        "{request}",
        "Requests that the last grants of the workers leave this gateway, by role.",
    )
    meter.create_observable_gauge(
        "tandem.admission.accounts",
        [of_counters(lambda counters: counters.num_waiting)],
        "{account}",
        "Accounts whose requests wait for room, by class.",
    )
    meter.create_observable_gauge(
        "tandem.admission.counter_spread",
        [of_counters(lambda counters: counters.spread_ms / 1000)],
        "s",
        "Device time by which the virtual counters of the accounts that wait differ at most, by class.",
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
