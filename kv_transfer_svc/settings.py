"""The settings of a KV service."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer_svc.transport.links import TRANSPORTS
from tandem_runtime import plaintext_settings
from tandem_runtime.plaintext_settings import HandleSettings
from tandem_runtime.settings import setting

_MIN_ARENA_BYTES = 1 << 20


@dataclass(frozen=True)
class KvSettings(HandleSettings):
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
    insecure: bool = plaintext_settings.insecure()
    tls_cert: str = setting(
        "",
        "PEM file of this process's certificate, leaf first; with --tls-key and --tls-ca, gRPC is encrypted and both "
        "sides are verified",
    )
    tls_key: str = setting("", "PEM file of the private key of --tls-cert")
    tls_ca: str = setting("", "PEM file of the trusted certificate authorities, one or two")
    join: str = setting(
        "",
        "join token of `tandem fleet token`, to get a certificate at the first start; pass it by variable",
        secret=True,
    )
    join_file: str = setting(
        "", "file with a join token; if empty, the one that a gateway of this machine writes into its state directory"
    )
    insecure_plaintext: bool = plaintext_settings.insecure_plaintext()
    plaintext_until: str = plaintext_settings.plaintext_until()
    grpc_reflection: bool = setting(
        False, "describe the gRPC methods to those who may call them, for tools such as grpcurl", shared=True
    )
    host_id: str = setting("", "name of this host; different names let one machine act as several hosts", shared=True)
    worker_id: str = setting("", "stable name of this service; from role, host, process id and incarnation if empty")
    arena_bytes: int = setting(
        256 << 20,
        "bytes for KV pulled from other hosts, taken as they are used; prompts pass in windows, so any length fits",
    )
    store_bytes: int | None = setting(
        None,
        "bytes for stored KV blocks, taken as they are used; if unset, a quarter of the pools of this host's workers, "
        "and at most 5 % of the free memory; 0: no store",
    )
    disk_bytes: int = setting(0, "bytes on disk for blocks evicted from memory; 0: no disk tier")
    disk_dir: str = setting("", "folder of the disk tier; `kv-disk` in the state directory if empty")
    account_bytes: int | None = setting(
        None, "maximum bytes in memory for the blocks of one account; no limit if unset"
    )
    hmac_handles_until: str = plaintext_settings.hmac_handles_until()
    lease_seconds: float = setting(10.0, "seconds until a reader's lease expires without renewal")
    max_handles: int = setting(65_536, "maximum handles at once; more are refused as overload")
    verify_kv: bool = setting(False, "verify the checksum of every block of this host, not only a sample", shared=True)
    drain_seconds: float = setting(120.0, "seconds that handles may take to end after SIGTERM")
    state_dir: str = setting(
        "", "folder of certificates and of the disk tier; the XDG state directory if empty", shared=True
    )
    loop_stall_seconds: float = setting(
        0.05,
        "seconds that the event loop may stand still before a log line names the code that stopped it; 0: never",
        shared=True,
    )
    log_json: bool | None = setting(None, "log JSON lines; decided by the terminal if unset", shared=True)
    metrics_listen: str = setting(
        "127.0.0.1:0",
        "address of the metrics (GET /metrics); port 0 takes a free one; beyond loopback over TLS; off if empty",
        shared=True,
    )
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
        _ = self.macs_until  # raises ValueError at start rather than later
        if self.lease_seconds <= 0:
            raise ValueError(f"--lease-seconds {self.lease_seconds:g} must be more than 0")
        if self.max_handles < 1:
            raise ValueError(f"--max-handles {self.max_handles} must be at least 1")
