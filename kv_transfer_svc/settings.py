"""The settings of a KV service."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer_svc.transport.links import TRANSPORTS
from tandem_runtime.settings import setting

_MIN_ARENA_BYTES = 1 << 20


@dataclass(frozen=True)
class KvSettings:
    """Settings of one host's KV service; each field is a flag, a variable and a key of tandem.toml."""

    control: tuple[str, ...] = setting(
        ("127.0.0.1:8643",), "gRPC addresses of the control plane's processes", shared=True
    )
    listen: str = setting("127.0.0.1:0", "address the gRPC server listens on; port 0 takes a free one")
    advertise: str = setting("", "address that others dial, if it differs from the listen address")
    transports: tuple[str, ...] = setting(
        TRANSPORTS, "transports for KV from other services: shm, tcp, grpc; grpc is required"
    )
    data_listen: str = setting(
        "", "address for raw TCP data connections; the host of --listen and a free port if empty"
    )
    data_advertise: str = setting("", "address that others dial for data; the host of --advertise if empty")
    insecure: bool = setting(False, "allow listening beyond loopback without TLS", shared=True)
    host_id: str = setting("", "name of this host; different names let one machine act as several hosts", shared=True)
    worker_id: str = setting("", "stable name of this service; built from role, host and process id if empty")
    arena_bytes: int = setting(256 << 20, "bytes for KV pulled from other hosts, allocated at start")
    store_bytes: int = setting(256 << 20, "bytes for stored KV blocks, allocated at start; 0: no store")
    disk_bytes: int = setting(0, "bytes on disk for blocks evicted from memory; 0: no disk tier")
    disk_dir: str = setting("", "folder of the disk tier; `kv-disk` in the state directory if empty")
    account_bytes: int | None = setting(
        None, "maximum bytes in memory for the blocks of one account; no limit if unset"
    )
    lease_seconds: float = setting(10.0, "seconds until a reader's lease expires without renewal")
    max_handles: int = setting(65_536, "maximum handles at once; more are refused as overload")
    verify_kv: bool = setting(False, "verify the checksum of every block of this host, not only a sample", shared=True)
    drain_seconds: float = setting(120.0, "seconds that handles may take to end after SIGTERM")
    loop_stall_seconds: float = setting(
        0.05,
        "seconds that the event loop may stand still before a log line names the code that stopped it; 0: never",
        shared=True,
    )
    log_json: bool | None = setting(None, "log JSON lines; decided by the terminal if unset", shared=True)
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    @property
    def data_address(self) -> str:
        """The address that data connections are accepted on."""
        return self.data_listen or f"{self.listen.rpartition(':')[0]}:0"

    def __post_init__(self) -> None:
        if self.arena_bytes < _MIN_ARENA_BYTES:
            raise ValueError(f"--arena-bytes {self.arena_bytes} is too small; give at least {_MIN_ARENA_BYTES}")
        if self.store_bytes and self.store_bytes < _MIN_ARENA_BYTES:
            raise ValueError(f"--store-bytes {self.store_bytes} is too small; give at least {_MIN_ARENA_BYTES}, or 0")
        if "grpc" not in self.transports or not set(self.transports) <= set(TRANSPORTS):
            raise ValueError(
                f"--transports {','.join(self.transports)} must be of {','.join(TRANSPORTS)} and include grpc, "
                "which always works"
            )
        if self.lease_seconds <= 0:
            raise ValueError(f"--lease-seconds {self.lease_seconds:g} must be more than 0")
        if self.max_handles < 1:
            raise ValueError(f"--max-handles {self.max_handles} must be at least 1")
