"""Defines the settings of a control-plane process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from control_plane.accounts.prices import DEFAULT_PRICES, PriceTable
from control_plane.generation import AccountPolicies
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.settings import setting


@dataclass(frozen=True)
class ControlPlaneSettings:
    """Settings of one control-plane process; each field is a flag, a variable and a key of tandem.toml."""

    listen: str = setting("127.0.0.1:8642", "address of the HTTP gateway")
    grpc_listen: str = setting("127.0.0.1:8643", "address that workers register at")
    replicas: tuple[str, ...] = setting((), "gRPC addresses of all control-plane processes, this one included")
    insecure: bool = setting(False, "allow listening beyond loopback without TLS", shared=True)
    reuse_port: bool = setting(
        False, "share the HTTP port with other gateways of this host that set this too; the kernel spreads connections"
    )
    request_timeout_seconds: float = setting(600.0, "deadline of a request")
    max_body_bytes: int = setting(10_000_000, "largest request body; more is answered with 413")
    max_unread_tokens: int = setting(
        8192, "tokens of a request that may wait for a slow client; with more waiting, the request is aborted"
    )
    stalled_client_seconds: float = setting(
        60.0,
        "seconds after which a connection that takes no data is closed and its request cancelled",
    )
    suspect_seconds: float = setting(3.0, "seconds without a heartbeat after which a worker gets no new requests")
    gone_seconds: float = setting(5.0, "seconds without a heartbeat after which a worker is forgotten")
    accept_seconds: float = setting(
        10.0, "seconds a worker may take to accept a request before the next worker is tried"
    )
    queue_seconds: float = setting(
        30.0, "seconds a request waits in the admission queue while every worker is full; then 429"
    )
    max_waiting: int = setting(512, "requests that may wait in the admission queue; more are refused with 429")
    local_prefill: Literal["auto", "never"] = setting(
        "auto",
        "auto: the decode worker computes a prompt itself if that is predicted to cost less than a hand-over; "
        "never: if there is a prefill worker, it computes every prompt",
    )
    prefix_index_blocks: int = setting(1_000_000, "blocks in the router's index of caches; 175 bytes each")
    prompt_cache_accounts: tuple[str, ...] = setting(
        (),
        "prompt cache policy per account, such as team-a=off,team-b=read:512,*=on: on, read, write or off, with an "
        "optional limit in leading prompt tokens; a request can only ask for less",
    )
    public_prefixes: Path | None = setting(
        None, "folder of *.txt files: texts (system prompts) whose cached blocks all accounts share; read at start"
    )
    probe_interval_seconds: float = setting(
        10.0, "seconds between readiness probes while no user's request proves readiness"
    )
    probe_valid_seconds: float = setting(30.0, "seconds that one proof of readiness lasts")
    audit_seconds: float = setting(
        10.0, "seconds between comparisons of the services' tables in search of leaks; 0: never"
    )
    audit_grace_seconds: float = setting(
        5.0, "seconds beyond the longest lease before a difference between two services is reported as a leak"
    )
    secret: str = setting(
        "",
        "hex secret for handles and cache salts; replicas share one; generated once if empty",
        shared=True,
        secret=True,
    )
    state_dir: str = setting("", "folder of secret and database; XDG state directory if empty", shared=True)
    database_url: str = setting(
        "",
        "database of accounts and ledger: postgresql://USER:PASSWORD@HOST/DATABASE, which replicas share, or "
        "sqlite:////PATH; a SQLite file in the state directory if empty",
        secret=True,
    )
    prices: tuple[str, ...] = setting(
        DEFAULT_PRICES,
        "prices as MODEL=INPUT/CACHED/OUTPUT, * for all others: US dollars per million computed prompt tokens, cached "
        "prompt tokens and answer tokens",
    )
    models: ModelTable = setting(SHIPPED, "other names, wire formats and prices of models", shared=True, file_only=True)
    fallback_model: str = setting(
        "",
        "for development: the model that answers, with the header tandem-fallback-model, if the requested model is not "
        "loaded; such requests are refused if empty",
    )
    gateway_gone_seconds: float = setting(
        30.0,
        "seconds of silence after which another gateway on the same database closes this one's requests as aborted",
    )
    operator_token: str = setting(
        "", "a token that may only read the fleet's state; `tandem up` generates its own", secret=True
    )
    log_json: bool | None = setting(None, "log JSON lines; if unset, unless stderr is a terminal", shared=True)
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    def __post_init__(self) -> None:
        AccountPolicies.parse(self.prompt_cache_accounts)  # raises ValueError at start rather than later
        PriceTable.parse(self.prices)
