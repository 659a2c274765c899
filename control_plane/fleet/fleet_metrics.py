"""Exports how many workers and models the fleet has. Series of one worker are exported by that worker alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from control_plane.fleet.call_watch import HealthState
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics

FORGET_SECONDS = 3600.0
"""A model whose workers are all gone counts as unready for so long; then it was taken out of service."""
_MAX_MODELS = 1_000
_ROLES = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
    pb.WORKER_ROLE_KV: "kv",
    pb.WORKER_ROLE_ENCODE: "encode",
}
_STATES = {
    pb.WORKER_STATE_LOADING: "loading",
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_DRAINING: "draining",
    pb.WORKER_STATE_FAILED: "failed",
}
_JUDGED = ("prefill", "decode")
_HEALTH: tuple[HealthState, ...] = ("ok", "detached", "ejected", "probation")
_ANSWERING = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE)
"""Roles that answer alone: a model with one of these is ready."""


def export(registry: WorkerRegistry, health: WorkerHealth | None = None) -> None:
    """Export `registry`, which is read in the exporter's thread: its snapshots never change."""
    meter, fleet = metrics.meter(), FleetCounts(registry)
    if health is not None:
        counts = HealthCounts(registry, health)
        meter.create_observable_gauge(
            "tandem.fleet.worker_health", [counts.workers], "{worker}", "Workers, by role and how requests find them."
        )
        meter.create_observable_counter(
            "tandem.fleet.ejections", [counts.ejections], "{ejection}", "Workers ejected, by role and cause."
        )
    meter.create_observable_gauge("tandem.fleet.workers", [fleet.workers], "{worker}", "Workers, by role and state.")
    meter.create_observable_gauge("tandem.fleet.models", [fleet.models], "{model}", "Models, by state.")
    meter.create_observable_gauge(
        "tandem.fleet.model_ready", [fleet.readiness], "1", "1 if a worker can answer for the model, else 0."
    )


class FleetCounts:
    """Counts workers and models, and remembers models whose workers are gone. Read by the exporter's thread."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._seen: dict[str, float] = {}

    def workers(self, options: CallbackOptions) -> Iterable[Observation]:
        counted = Counter((_ROLES.get(worker.role, "unknown"), _state(worker)) for worker in self._registry.workers())
        return [Observation(number, {"role": role, "state": state}) for (role, state), number in counted.items()]

    def models(self, options: CallbackOptions) -> Iterable[Observation]:
        states = Counter("ready" if is_ready else "unready" for is_ready in self._ready().values())
        return [Observation(states[state], {"state": state}) for state in ("ready", "unready")]

    def readiness(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(int(is_ready), {"model": model}) for model, is_ready in self._ready().items()]

    def _ready(self) -> dict[str, bool]:
        """Return for each model of the last hour whether a worker can answer for it."""
        now, workers = self._clock(), self._registry.workers()
        for worker in workers:
            model = worker.info.card.model_id
            if model and (model in self._seen or len(self._seen) < _MAX_MODELS):
                self._seen[model] = now
        self._seen = {model: seen for model, seen in self._seen.items() if now - seen < FORGET_SECONDS}
        answering = {worker.info.card.model_id for worker in workers if worker.role in _ANSWERING and worker.is_usable}
        return {model: model in answering for model in self._seen}


class HealthCounts:
    """Counts workers by what requests of this gateway find. Read by the exporter's thread."""

    def __init__(self, registry: WorkerRegistry, health: WorkerHealth) -> None:
        self._registry = registry
        self._health = health

    def workers(self, options: CallbackOptions) -> Iterable[Observation]:
        counted = Counter({(role, state): 0 for role in _JUDGED for state in _HEALTH})
        for worker in self._registry.workers():
            if (role := _ROLES.get(worker.role, "")) in _JUDGED:
                counted[role, self._health.status(worker).state] += 1
        return [Observation(number, {"role": role, "health": state}) for (role, state), number in counted.items()]

    def ejections(self, options: CallbackOptions) -> Iterable[Observation]:
        ejections = self._health.num_ejections.copy()
        return [
            Observation(number, {"role": "prefill" if role == pb.WORKER_ROLE_PREFILL else "decode", "cause": cause})
            for (role, cause), number in ejections.items()
        ]


def _state(worker: Worker) -> str:
    if worker.is_suspected:
        return "suspected"
    if worker.apart_for:
        return "apart"
    return _STATES.get(worker.load.state, "loading")
