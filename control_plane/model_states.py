"""Says of each model whether requests for it can be answered now, and if not, why. /readyz shows it.

    proven      a request has passed every phase lately; an encoder: a worker of it takes requests
    full        the last probe found every worker full: nothing is broken, and requests wait in the model's room
    loading     no request can pass every phase before a worker has loaded, or this gateway has the model's files
    unproven    workers take requests for it, and none has passed every phase lately
    unusable    its workers' files cannot be used
    lost        none of its workers takes requests

A model that is proven or full is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

State = Literal["proven", "full", "loading", "unproven", "unusable", "lost"]

_REMEMBERED_SECONDS = 3600.0
"""How long a model without any worker is shown as lost."""
_MAX_REMEMBERED = 1024
_NEVER = "no request has gone the whole way yet"


class FilesOfModels(Protocol):
    def problem_of(self, model_id: str) -> str:
        """Return why a model's files cannot be used; "" if they can."""

    def without_files(self) -> frozenset[str]:
        """Return the served models whose files no worker has sent yet."""


@dataclass(frozen=True)
class ModelState:
    name: State
    reason: str = ""
    """Why the model is not proven."""

    @property
    def is_ready(self) -> bool:
        return self.name in ("proven", "full")


class ModelStates:
    """Joins what workers say, what their files are like, and what probes and requests have shown."""

    def __init__(
        self,
        registry: WorkerRegistry,
        files: FilesOfModels,
        proofs: ReadinessProofs,
        valid_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`valid_seconds`: how long one proof, or one probe that met full workers, holds."""
        self._registry = registry
        self._files = files
        self._proofs = proofs
        self._valid_seconds = valid_seconds
        self._clock = clock
        self._full: dict[str, tuple[float, str]] = {}
        self._failures: dict[str, str] = {}
        self._were_proven: set[str] = set()
        """Models that have been proven since their decode workers last came."""
        self._seen_at: dict[str, float] = {}

    def probe_met_full_workers(self, model_id: str, reason: str) -> None:
        self._full[model_id] = self._clock(), reason
        self._failures.pop(model_id, None)

    def probe_failed(self, model_id: str, reason: str) -> None:
        self._failures[model_id] = reason
        self._full.pop(model_id, None)

    def has_failed(self, model_id: str) -> bool:
        """Return whether the last probe of the model failed."""
        return model_id in self._failures

    def is_full(self, model_id: str) -> bool:
        """Return whether the last probe of the model met full workers."""
        return model_id in self._full

    def all(self) -> dict[str, ModelState]:
        """Return the state of every model that has workers, or had some lately."""
        now = self._clock()
        by_model = {model_id: self._registry.workers_of(model_id) for model_id in self._registry.model_ids()}
        for model_id in by_model:
            self._seen_at.pop(model_id, None)  # the longest unseen come first
            self._seen_at[model_id] = now
        self._forget(now)
        loading = self.loading_worker(pb.WORKER_ROLE_PREFILL)
        without_files = self._files.without_files()
        states = {}
        for model_id in sorted(self._seen_at):
            state = self._of(model_id, by_model.get(model_id, ()), loading)
            if model_id in without_files and state.name in ("proven", "full", "unproven"):
                state = ModelState("loading", f"this gateway has not got the files of {model_id} from its workers yet")
            states[model_id] = state
        return states

    def _forget(self, now: float) -> None:
        while self._seen_at:
            model_id = next(iter(self._seen_at))
            if now - self._seen_at[model_id] <= _REMEMBERED_SECONDS and len(self._seen_at) <= _MAX_REMEMBERED:
                break
            del self._seen_at[model_id]
        for kept in (self._full, self._failures):
            for model_id in [each for each in kept if each not in self._seen_at]:
                del kept[model_id]

    def _of(self, model_id: str, workers: list[Worker] | tuple[()], loading: str) -> ModelState:
        if workers and (problem := self._files.problem_of(model_id)):
            return ModelState("unusable", problem)
        if any(worker.role == pb.WORKER_ROLE_ENCODE and worker.is_usable for worker in workers):
            return ModelState("proven")
        if not any(worker.role == pb.WORKER_ROLE_DECODE and worker.is_usable for worker in workers):
            self._were_proven.discard(model_id)
            return self._without_worker(model_id, workers)
        age = self._proofs.age(model_id)
        if loading and model_id not in self._were_proven and not _has_prefill(workers):
            return ModelState("loading", loading)
        if age is not None and age < self._valid_seconds:
            self._were_proven.add(model_id)
            self._full.pop(model_id, None)
            self._failures.pop(model_id, None)
            return ModelState("proven")
        full_at, reason = self._full.get(model_id, (0.0, ""))
        if reason and self._clock() - full_at < self._valid_seconds:
            return ModelState("full", reason)
        return ModelState("unproven", self._failures.get(model_id, _NEVER if age is None else "its proof is too old"))

    def _without_worker(self, model_id: str, workers: list[Worker] | tuple[()]) -> ModelState:
        for worker in workers:
            if worker.role != pb.WORKER_ROLE_PREFILL and worker.load.state == pb.WORKER_STATE_LOADING:
                return ModelState("loading", _is_loading(worker))
        is_encoder = any(worker.role == pb.WORKER_ROLE_ENCODE for worker in workers)
        return ModelState("lost", f"no {'encode' if is_encoder else 'decode'} worker is ready for {model_id}")

    def loading_worker(self, *roles: pb.WorkerRole.ValueType) -> str:
        """Return which worker of these roles is loading, "" if none. It names its model only once that is loaded."""
        for worker in (each for role in roles for each in self._registry.workers(role)):
            if worker.load.state == pb.WORKER_STATE_LOADING:
                return _is_loading(worker)
        return ""


def _has_prefill(workers: list[Worker] | tuple[()]) -> bool:
    return any(worker.role == pb.WORKER_ROLE_PREFILL and worker.is_usable for worker in workers)


def _is_loading(worker: Worker) -> str:
    return f"{worker.worker_id} is loading: {worker.load.load_stage}"
