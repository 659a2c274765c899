"""Workers that are only registered: a fleet of any size, for what a gateway shows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb

GIB = 1 << 30
_BLOCKS = 1000


@dataclass
class Herd:
    """Registers `num_workers` workers, eight to a host: a prefill worker, six decode workers and a KV service.

    Each prefill or decode worker has a GPU of its own, of which others use 4 GiB.
    """

    registry: WorkerRegistry
    num_workers: int
    address: str = "127.0.0.1:1"
    card: pb.ModelCard = field(
        default_factory=lambda: pb.ModelCard(model_id="@stand-in/model", context_length=4096, block_size=16)
    )
    infos: list[pb.WorkerInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.infos = [self._info(place) for place in range(self.num_workers)]
        for place, info in enumerate(self.infos):
            self.registry.register(info, load_of(place))

    def beat(self, place: int, load: pb.LoadReport) -> None:
        """Let one worker report a load."""
        info = self.infos[place]
        beat = cp.HeartbeatRequest(worker_id=info.worker_id, incarnation=info.incarnation, load=load)
        assert self.registry.heartbeat(beat)

    def leave(self, place: int) -> None:
        self.registry.deregister(self.infos[place].worker_id, self.infos[place].incarnation)

    def _info(self, place: int) -> pb.WorkerInfo:
        name, role = _role(place)
        return pb.WorkerInfo(
            worker_id=f"{name}-{place}",
            incarnation=f"{place:016x}",
            role=role,
            host_id=f"rack-{place // 8}",
            address=self.address,
            version="0.2.0",
            card=None if role == pb.WORKER_ROLE_KV else self.card,
        )


def _role(place: int) -> tuple[str, pb.WorkerRole.ValueType]:
    seat = place % 8
    if seat == 0:
        return "prefill", pb.WORKER_ROLE_PREFILL
    return ("kv", pb.WORKER_ROLE_KV) if seat == 7 else ("decode", pb.WORKER_ROLE_DECODE)


def load_of(
    place: int,
    *,
    state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY,
    num_running: int = 0,
    own_bytes: int = 60 * GIB,
    tokens_generated: float = 0.0,
) -> pb.LoadReport:
    """Return a worker's report: `own_bytes` of the 80 GiB of its GPU are Tandem's."""
    role = _role(place)[1]
    host = pb.HostMemory(total_bytes=1024 * GIB, available_bytes=900 * GIB, process_bytes=2 * GIB)
    load = pb.LoadReport(state=state, num_running=num_running, memory=pb.MemoryReport(host=host, source="nvml"))
    if role == pb.WORKER_ROLE_KV:
        load.kv_service.store.total_bytes = 64 * GIB
        load.kv_service.store.cached_bytes = 24 * GIB
        load.kv_service.store.free_bytes = 40 * GIB
        return load
    load.counters["tokens_generated"] = tokens_generated
    load.kv.CopyFrom(
        pb.KvPool(
            num_total_blocks=_BLOCKS,
            num_used_blocks=300,
            num_held_blocks=50,
            num_cached_blocks=400,
            num_free_blocks=300,
            tokens_per_block=16,
            bytes_per_block=2 << 20,
        )
    )
    seat = place % 8
    load.memory.devices.add(
        index=seat,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{place}",
        total_bytes=80 * GIB,
        used_bytes=own_bytes + 4 * GIB,
        foreign_bytes=4 * GIB,
        free_bytes=76 * GIB - own_bytes,
        utilization_percent=61,
        temperature_celsius=54,
        power_milliwatts=412_000,
    )
    return load
