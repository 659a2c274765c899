"""Keeps the registered workers and the last report of each."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from control_plane.fleet.model_variants import ModelVariants, Variant, remedy_of, variant_of
from control_plane.fleet.worker_figures import WorkerFigures, figures_of
from control_plane.generation import DEFAULT_GRAIN
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded, StaleIncarnation
from tandem_runtime.kv.spaces import model_identity, space_of
from tandem_runtime.log import get_logger

log = get_logger(__name__)

RESTART_SECONDS = 15.0
"""How long requests wait for a worker that died or drains to be back: about the time to load a model."""

RELAYED_SECONDS = 2.0
"""A worker's heartbeats come each second, and wait at its KV service for up to another one. Suspicion comes at 3 s."""
_LONG_PAUSE_SECONDS = 1.0
_MAX_REPLACED = 1024
_MAX_CHANGES_PER_SWEEP = 16
"""Each takes a fraction of a millisecond: line of log, listeners, end of a stream. A rack has hundreds of workers."""
MAX_WORKERS = 16_384

Listener = Callable[["Worker", bool], None]
"""Called with a worker and whether it is registered, after every change except a heartbeat's load."""
LoadListener = Callable[["Worker"], None]
"""Called with a worker after each of its heartbeats."""


_BY_REPORT = ("figures", "is_usable", "is_ready")
"""The cached properties of a worker that the next report changes."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker as of its last heartbeat; a snapshot that never changes."""

    info: pb.WorkerInfo
    load: pb.LoadReport
    last_heartbeat: float
    """time.monotonic() seconds."""
    is_suspected: bool = False
    info_version: int = 0
    variant: Variant = ()
    """What the workers of one model must share."""
    identity: bytes = b""
    """Of the model's weights, quantization and tokenizer."""
    space: bytes = b""
    """Names the KV blocks that the worker may read and write; see tandem_runtime/kv/spaces.py."""
    apart_for: str = ""
    """Why the worker gets no requests although it is ready: in which field its card differs from the model's."""
    gone_for: str = ""
    """Of a worker that is registered no longer: replaced, moved, deregistered or silent."""
    number: int = 0
    """Of its last report; 0: its reports have none."""
    relayed_at: float = -math.inf
    """When the last heartbeat came through the worker's host, in time.monotonic() seconds."""

    @cached_property
    def worker_id(self) -> str:
        return self.info.worker_id

    @cached_property
    def incarnation(self) -> str:
        return self.info.incarnation

    @cached_property
    def role(self) -> pb.WorkerRole.ValueType:
        return self.info.role

    @cached_property
    def figures(self) -> WorkerFigures:
        """What routing reads, several times a request."""
        return figures_of(self.info, self.load)

    @cached_property
    def is_usable(self) -> bool:
        """Whether new requests may go there."""
        return self.is_ready and not self.apart_for

    @cached_property
    def is_ready(self) -> bool:
        return self.load.state == pb.WORKER_STATE_READY and not self.is_suspected

    def reported(self, info: pb.WorkerInfo, load: pb.LoadReport, now: float, number: int, relayed_at: float) -> Worker:
        """Return the worker as of a later heartbeat: as `dataclasses.replace`, but it keeps what stays as it is.

        `info` differs at most in the address of the KV service. A gateway takes in a thousand heartbeats a second.
        """
        fresh = object.__new__(Worker)
        fields = fresh.__dict__
        fields.update(self.__dict__)
        fields.update(
            info=info, load=load, last_heartbeat=now, is_suspected=False, number=number, relayed_at=relayed_at
        )
        for name in _BY_REPORT:
            fields.pop(name, None)
        return fresh

    def serves(self, model_id: str) -> bool:
        return self.is_usable and self.info.card.model_id == model_id


class WorkerRegistry:
    """The only writer of the fleet's soft state; on one event loop. `clock` gives monotonic seconds."""

    def __init__(
        self,
        suspect_seconds: float,
        gone_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        grain: int = DEFAULT_GRAIN,
    ) -> None:
        """`grain`: tokens per hash of a prompt; a worker with blocks of another size than its multiples is no use."""
        self._grain = grain
        self._suspect_seconds = suspect_seconds
        self._gone_seconds = gone_seconds
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._ids_by_role: dict[pb.WorkerRole.ValueType, dict[str, None]] = {}
        """Every heartbeat asks for its host's KV services: the other workers are not looked at for that."""
        self._ids_by_model: dict[str, dict[str, None]] = {}
        self._kv_by_host: dict[str, dict[str, None]] = {}
        """The ids of KV services by host id: routing asks for them several times a request."""
        self._kv_addresses: set[str] | None = None
        """Of those that may be used; None after a change."""
        self._listeners: list[Listener] = []
        self._load_listeners: list[LoadListener] = []
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._last_sweep = clock()
        self._variants = ModelVariants()

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def listen_to_loads(self, listener: LoadListener) -> None:
        self._load_listeners.append(listener)

    def workers(self, role: pb.WorkerRole.ValueType | None = None) -> list[Worker]:
        if role is None:
            return list(self._workers.values())
        return [self._workers[worker_id] for worker_id in self._ids_by_role.get(role, ())]

    def workers_of(self, model_id: str) -> list[Worker]:
        """Return the workers of a model, ready or not."""
        return [self._workers[worker_id] for worker_id in self._ids_by_model.get(model_id, ())]

    def serves(self, model_id: str) -> bool:
        """Return whether a decode worker takes requests for the model."""
        workers = (self._workers[worker_id] for worker_id in self._ids_by_model.get(model_id, ()))
        return any(worker.role == pb.WORKER_ROLE_DECODE and worker.is_usable for worker in workers)

    def has_model(self, model_id: str) -> bool:
        """Return whether any worker of the model is registered, ready or not."""
        return model_id in self._ids_by_model

    def model_ids(self) -> list[str]:
        """Return the models of all registered workers, in order."""
        return sorted(self._ids_by_model)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def is_here(self, worker: Worker) -> bool:
        """Return whether this incarnation of a worker is registered."""
        known = self._workers.get(worker.worker_id)
        return known is not None and known.incarnation == worker.incarnation

    def kv_services(self, host_id: str | None = None) -> list[cp.KvServiceAddress]:
        """Return the addresses of the KV services, of one host or of all."""
        return [
            cp.KvServiceAddress(
                address=worker.info.address,
                incarnation=worker.incarnation,
                host_id=worker.info.host_id,
                socket=worker.info.kv_socket,
                worker_id=worker.worker_id,
            )
            for worker in (self.workers(pb.WORKER_ROLE_KV) if host_id is None else self._kv_of(host_id))
            if worker.is_usable
        ]

    def kv_incarnations(self, host_id: str) -> tuple[str, ...]:
        """Return the incarnations of a host's KV services that may be used."""
        return tuple([worker.incarnation for worker in self._kv_of(host_id) if worker.is_usable])

    def _kv_of(self, host_id: str) -> list[Worker]:
        return [self._workers[worker_id] for worker_id in self._kv_by_host.get(host_id, ())]

    def kv_service_of(self, host_id: str) -> Worker | None:
        """Return the KV service that counts for a host: of those that may be used, or else of all, the newest.

        A host has two while one takes the place of another under a new name.
        """
        found = None
        for worker_id in reversed(self._kv_by_host.get(host_id, {})):
            worker = self._workers[worker_id]
            if worker.is_usable:
                return worker
            found = found or worker
        return found

    def store_of(self, host_id: str) -> Worker | None:
        """Return the KV service of a host if it may be used and its last report has a block store."""
        worker = self.kv_service_of(host_id)
        return worker if worker is not None and worker.is_usable and worker.figures.has_store else None

    def kv_addresses(self) -> Set[str]:
        """Return the addresses of the KV services that may be used."""
        if self._kv_addresses is None:
            self._kv_addresses = {each.info.address for each in self.workers(pb.WORKER_ROLE_KV) if each.is_usable}
        return self._kv_addresses

    def register(self, info: pb.WorkerInfo, load: pb.LoadReport, info_version: int = 0, number: int = 0) -> None:
        """Add a worker or update it; another incarnation replaces the earlier one for good.

        A call that a later call overtook changes nothing: the worker would otherwise stay in an old state for good.
        Raises StaleIncarnation for a replaced incarnation: two processes of one name would otherwise take turns.
        """
        if info.incarnation in self._replaced:
            raise StaleIncarnation(
                f"worker {info.worker_id} was started again after incarnation {info.incarnation}; to run both, "
                "give each its own --worker-id"
            )
        previous = self._workers.get(info.worker_id)
        if previous is None and len(self._workers) >= MAX_WORKERS:
            raise Overloaded(
                f"{MAX_WORKERS:,} workers are registered, which is the most a gateway keeps; stop some",
                retry_after_seconds=self._gone_seconds,
            )
        if previous is not None and previous.incarnation == info.incarnation and info_version < previous.info_version:
            log.info("late_registration_ignored", worker=info.worker_id, version=info_version)
            return
        if previous is not None and previous.incarnation == info.incarnation and _place(previous.info) != _place(info):
            self._forget(previous, "moved")  # who keeps something by host or role hears that the worker is not there
        elif previous is not None and previous.incarnation != info.incarnation:
            self._forget(previous, "replaced")
            self._replaced[previous.incarnation] = None
            if len(self._replaced) > _MAX_REPLACED:
                self._replaced.popitem(last=False)
        worker = Worker(
            info,
            load,
            self._clock(),
            info_version=info_version,
            number=number,
            variant=variant_of(info.card, self._grain),
            identity=model_identity(info.card.fingerprint),
            space=space_of(info.card),
        )
        also_changed = self._put(worker)
        worker = self._workers[info.worker_id]
        log.info(
            "worker_registered",
            worker=info.worker_id,
            role=pb.WorkerRole.Name(info.role),
            address=info.address,
            model=info.card.model_id,
        )
        self._notify(worker, True)
        self._notify_all(also_changed, worker)

    def set_unusable(self, model_id: str, variant: Variant, is_unusable: bool) -> None:
        """Note whether a variant's tokenizer and template can be used: one that cannot gives way to any other."""
        if self._variants.set_unusable(model_id, variant, is_unusable):
            self._notify_all(self._choose_variants(model_id))

    def relayed(self, beat: cp.HeartbeatRequest, host_id: str) -> bool:
        """Take in a heartbeat that came through the KV service of a host; return False if it is of no worker there."""
        worker = self._workers.get(beat.worker_id)
        if worker is None or worker.info.host_id != host_id or worker.incarnation != beat.incarnation:
            return False
        return self.heartbeat(beat, is_relayed=True)

    def is_relayed(self, worker: Worker) -> bool:
        """Return whether the worker's heartbeats come through its host."""
        return worker.relayed_at > self.silent_at()

    def silent_at(self) -> float:
        """Return the latest moment of a worker's last relayed heartbeat at which its host tells nothing of it."""
        return self._clock() - RELAYED_SECONDS

    def heartbeat(self, beat: cp.HeartbeatRequest, *, is_relayed: bool = False) -> bool:
        """Return False if the sender has to register (again); raises StaleIncarnation for an earlier incarnation."""
        worker = self._workers.get(beat.worker_id)
        if worker is None:
            return False
        if worker.incarnation != beat.incarnation:
            raise StaleIncarnation(
                f"worker {beat.worker_id} is incarnation {worker.incarnation} now, the heartbeat came from "
                f"{beat.incarnation}"
            )
        if beat.info_version != worker.info_version:  # a late heartbeat, or a registration was missed
            return beat.info_version < worker.info_version
        info = worker.info
        if beat.kv_address != info.kv_address:
            info = pb.WorkerInfo()
            info.CopyFrom(worker.info)
            info.kv_address = beat.kv_address
        now = self._clock()
        relayed_at = now if is_relayed else worker.relayed_at
        if 0 < beat.number <= worker.number:  # it waited at the host while a later one came directly, or before it
            self._workers[beat.worker_id] = replace(worker, relayed_at=relayed_at)
            return True
        fresh = worker.reported(info, beat.load, now, beat.number, relayed_at)
        self._workers[beat.worker_id] = fresh
        if worker.load.state != fresh.load.state or worker.is_suspected:
            self._state_changed(fresh)
            fresh = self._workers[beat.worker_id]
        for listener in self._load_listeners:
            listener(fresh)
        return True

    def deregister(self, worker_id: str, incarnation: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            self._forget(worker, "deregistered")

    def sweep(self) -> bool:
        """Suspect and forget silent workers, at most 16; called a few times a second.

        Return whether the next call should follow in the next turn of the event loop: more workers may be silent.

        While this process was stopped or starved, no heartbeat could arrive: that time does not count as silence.
        """
        now, pause = self._clock(), self._clock() - self._last_sweep
        self._last_sweep = now
        if pause > _LONG_PAUSE_SECONDS:
            log.warning("sweep_late", seconds=round(pause, 1))
            self._workers = {
                worker_id: replace(
                    worker,
                    last_heartbeat=min(now, worker.last_heartbeat + pause),
                    relayed_at=min(now, worker.relayed_at + pause),
                )
                for worker_id, worker in self._workers.items()
            }
            return False
        num_changed = 0
        for worker_id in list(self._workers):
            worker = self._workers[worker_id]  # as it is now: the end of another may have changed it
            silence = now - worker.last_heartbeat
            if num_changed == _MAX_CHANGES_PER_SWEEP:
                return True
            if silence > self._gone_seconds:
                num_changed += 1
                self._forget(worker, "silent")
            elif silence > self._suspect_seconds and not worker.is_suspected:
                num_changed += 1
                suspected = replace(worker, is_suspected=True)
                self._workers[worker.worker_id] = suspected
                log.warning("worker_suspected", worker=worker.worker_id, silent_seconds=round(silence, 1))
                self._state_changed(suspected)
        return False

    def _forget(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.worker_id]
        del self._ids_by_role[worker.role][worker.worker_id]
        self._place_kv(worker, is_here=False)
        self._unlist(worker)
        log.info("worker_gone", worker=worker.worker_id, incarnation=worker.incarnation, reason=reason)
        also_changed = self._left(worker)
        self._notify(replace(worker, gone_for=reason), False)
        self._notify_all(also_changed)

    def _put(self, worker: Worker) -> list[Worker]:
        """Keep a registered worker; return the workers of its model that come forward or step back with it."""
        previous = self._workers.get(worker.worker_id)
        self._workers[worker.worker_id] = worker
        if previous is not None and previous.role != worker.role:
            del self._ids_by_role[previous.role][worker.worker_id]
        self._ids_by_role.setdefault(worker.role, {})[worker.worker_id] = None
        model_id = worker.info.card.model_id
        if previous is not None:
            self._place_kv(previous, is_here=False)
            if previous.info.card.model_id != model_id:
                self._unlist(previous)
        self._place_kv(worker, is_here=True)
        if model_id:
            self._ids_by_model.setdefault(model_id, {})[worker.worker_id] = None
            self._variants.add(model_id, worker.variant)
        changed = self._left(previous) if previous is not None else []
        return changed + self._choose_variants(model_id)

    def _place_kv(self, worker: Worker, *, is_here: bool) -> None:
        if worker.role != pb.WORKER_ROLE_KV:
            return
        self._kv_addresses = None
        ids = self._kv_by_host.setdefault(worker.info.host_id, {})
        if is_here:
            ids[worker.worker_id] = None
        else:
            ids.pop(worker.worker_id, None)
        if not ids:
            del self._kv_by_host[worker.info.host_id]

    def _unlist(self, worker: Worker) -> None:
        """Take a worker from the list of its model."""
        model_id = worker.info.card.model_id
        if model_id:
            del self._ids_by_model[model_id][worker.worker_id]
            if not self._ids_by_model[model_id]:
                del self._ids_by_model[model_id]

    def _left(self, worker: Worker) -> list[Worker]:
        """A worker no longer serves a model as this snapshot says; return the workers for which that changes it."""
        model_id = worker.info.card.model_id
        if not model_id:
            return []
        was_mixed = self._variants.is_mixed(model_id)
        self._variants.remove(model_id, worker.variant)
        return self._choose_variants(model_id, is_other=was_mixed)

    def _state_changed(self, worker: Worker) -> None:
        """Notify of a worker that is ready now, or no longer, and of those that come forward or step back with it."""
        self._kv_addresses = None
        also_changed = self._choose_variants(worker.info.card.model_id)
        worker = self._workers[worker.worker_id]
        self._notify(worker, True)
        self._notify_all(also_changed, worker)

    def _choose_variants(self, model_id: str, *, is_other: bool = False) -> list[Worker]:
        """Let one variant of the model get requests; return the workers for which that changed.

        `is_other`: workers were added or removed, so the last other variant may be gone.
        """
        if not model_id or not (is_other or self._variants.is_mixed(model_id)):
            return []
        of_model = self.workers_of(model_id)
        changed = []
        for worker, reason in zip(of_model, self._variants.choose(model_id, of_model), strict=True):
            if worker.apart_for == reason:
                continue
            changed.append(replace(worker, apart_for=reason))
            self._workers[worker.worker_id] = changed[-1]
            if reason:
                remedy = remedy_of(reason, worker.info.card.block_size, self._grain)
                log.warning(
                    "worker_kept_apart", worker=worker.worker_id, model=model_id, differs_in=reason, remedy=remedy
                )
        return changed

    def _notify_all(self, workers: Sequence[Worker], notified: Worker | None = None) -> None:
        for worker in workers:
            if worker is not notified:
                self._notify(worker, True)

    def _notify(self, worker: Worker, is_here: bool) -> None:
        for listener in self._listeners:
            listener(worker, is_here)


def _place(info: pb.WorkerInfo) -> tuple[str, pb.WorkerRole.ValueType]:
    return info.host_id, info.role
