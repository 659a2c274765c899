"""The processes of each host, and the registry's view of them.

A process sends a heartbeat each second while it runs and its host is reachable. After 3 s without a heartbeat the
process gets no new requests; after 5 s it counts as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tests.kv_transfer_svc.simulation.lives import Environment, KvLife, Life, WorkerLife

GATEWAY_HOST = 9
_SUSPECT_SECONDS = 3.0
_GONE_SECONDS = 5.0

PLACES: dict[str, tuple[pb.WorkerRole.ValueType, int]] = {
    "kv0": (pb.WORKER_ROLE_KV, 0),
    "kv1": (pb.WORKER_ROLE_KV, 1),
    "prefill0": (pb.WORKER_ROLE_PREFILL, 0),
    "prefill1": (pb.WORKER_ROLE_PREFILL, 1),
    "decode0": (pb.WORKER_ROLE_DECODE, 0),
    "decode1": (pb.WORKER_ROLE_DECODE, 1),
    "decode2": (pb.WORKER_ROLE_DECODE, 0),
}
"""Two emulated hosts."""


class Fleet:
    """All lives, and the registry's view of them."""

    def __init__(self, around: Environment) -> None:
        self.lives: dict[str, Life] = {}
        self.all_lives: list[Life] = []
        self.on_change: Callable[[Life, bool], None] = lambda life, is_here: None
        self._around = around
        self._last_heartbeats: dict[Life, float] = {}
        self._number = 0

    # ------------------------------------------------------------------------------------------------ starting

    def start(self, place: str) -> None:
        role, host = PLACES[place]
        self._number += 1
        incarnation = f"{place}-{self._number}"
        same_port = place in self.lives and self._around.rng.random() < 0.5
        address = self.lives[place].info.address if same_port else f"{incarnation}:1"
        info = pb.WorkerInfo(
            worker_id=place,
            incarnation=incarnation,
            role=role,
            host_id=str(host),
            address=address,
            kv_socket=f"/run/{incarnation}.sock",
        )
        if role == pb.WORKER_ROLE_KV:
            life: Life = KvLife(self._around, info, host)
        else:
            life = WorkerLife(self._around, info, host, lambda: self.kv_of(host))
        self.lives[place] = life
        self.all_lives.append(life)

    def close(self) -> None:
        for life in self.all_lives:
            life.close()

    # ------------------------------------------------------------------------------------------------- finding

    @property
    def kv_services(self) -> Iterator[KvLife]:
        return (life for life in self.lives.values() if isinstance(life, KvLife) and not life.process.is_dead)

    @property
    def workers(self) -> Iterator[WorkerLife]:
        return (life for life in self.lives.values() if isinstance(life, WorkerLife) and not life.process.is_dead)

    def usable(self, role: pb.WorkerRole.ValueType) -> list[WorkerLife]:
        """Return the workers that may get a new request."""
        now = self._around.loop.time()
        return [
            life
            for life, last_heartbeat in self._last_heartbeats.items()
            if isinstance(life, WorkerLife) and life.info.role == role and now - last_heartbeat < _SUSPECT_SECONDS
        ]

    def kv_of(self, host: int) -> cp.KvServiceAddress | None:
        """Return the KV service that the control plane names: the last one that registered."""
        named = [life for life in self._last_heartbeats if isinstance(life, KvLife) and life.process.host == host]
        return named[-1].named if named else None

    def holder(self, address: str) -> cp.KvServiceAddress | None:
        named = [life.named for life in self._last_heartbeats if isinstance(life, KvLife)]
        return next((service for service in named if service.address == address), None)

    # ---------------------------------------------------------------------------------------------- heartbeats

    def beat(self) -> None:
        """Process one second of heartbeats."""
        now = self._around.loop.time()
        for place, life in self.lives.items():
            if self._is_reachable(life):
                self._record_heartbeat(place, life, now)
        for life, last_heartbeat in list(self._last_heartbeats.items()):
            if now - last_heartbeat > _GONE_SECONDS:
                self._forget(life)

    def _is_reachable(self, life: Life) -> bool:
        apart = frozenset((life.process.host, GATEWAY_HOST)) in self._around.network._apart
        return life.is_ready and life.process.is_running and not apart

    def _record_heartbeat(self, place: str, life: Life, now: float) -> None:
        is_new = life not in self._last_heartbeats
        for other in [known for known in self._last_heartbeats if known.info.worker_id == place and known is not life]:
            self._forget(other)
        self._last_heartbeats[life] = now
        if is_new:
            self.on_change(life, True)

    def _forget(self, life: Life) -> None:
        del self._last_heartbeats[life]
        self.on_change(life, False)
