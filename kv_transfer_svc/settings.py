"""What can be set on a KV service?"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.settings import setting

_MIN_ARENA_BYTES = 1 << 20


@dataclass(frozen=True)
class KvSettings:
    """Settings of the KV service of one host; each field is a flag, a variable and a key of tandem.toml."""

    control: tuple[str, ...] = setting(
        ("127.0.0.1:8643",), "gRPC addresses of the control plane's processes", shared=True
    )
    listen: str = setting("127.0.0.1:0", "address the gRPC server listens on; port 0 takes a free one")
    advertise: str = setting("", "address that others dial, where it differs from the one listened on")
    insecure: bool = setting(False, "allow listening beyond loopback without TLS", shared=True)
    host_id: str = setting("", "name of this host; lets one machine play several", shared=True)
    worker_id: str = setting("", "stable name of this service; made from role, host and process id if empty")
    arena_bytes: int = setting(256 << 20, "bytes for KV pulled from other hosts, taken at start")
    lease_seconds: float = setting(10.0, "how long a reader's lease lasts unless it is renewed")
    max_handles: int = setting(65_536, "handles kept at once; more are refused as overload")
    verify_kv: bool = setting(False, "verify every checksum of blocks sealed on this host, not a sample")
    drain_seconds: float = setting(120.0, "how long handles may take to end after SIGTERM")
    log_json: bool | None = setting(None, "log JSON lines; decided by the terminal if unset", shared=True)
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    def __post_init__(self) -> None:
        if self.arena_bytes < _MIN_ARENA_BYTES:
            raise ValueError(f"--arena-bytes {self.arena_bytes} is too small; give at least {_MIN_ARENA_BYTES}")
        if self.lease_seconds <= 0:
            raise ValueError(f"--lease-seconds {self.lease_seconds:g} must be more than 0")
        if self.max_handles < 1:
            raise ValueError(f"--max-handles {self.max_handles} must be at least 1")
