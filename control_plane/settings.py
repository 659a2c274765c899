"""What can be set on the control plane?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from control_plane.accounts.prices import DEFAULT_PRICES, PriceTable
from control_plane.cache_policy import AccountPolicies
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
        False, "share the HTTP port with other gateways of this host that say so, too; the kernel spreads connections"
    )
    request_timeout_seconds: float = setting(600.0, "deadline of a request")
    max_body_bytes: int = setting(10_000_000, "largest request body; more is answered with 413")
    max_unread_tokens: int = setting(
        8192, "tokens of a request that may wait for a client that reads too slowly; with more the request is aborted"
    )
    stalled_client_seconds: float = setting(
        60.0,
        "a connection that takes nothing of what was written to it for so long is closed, and its request cancelled",
    )
    suspect_seconds: float = setting(3.0, "silence after which a worker gets no new requests")
    gone_seconds: float = setting(5.0, "silence after which a worker is forgotten")
    accept_seconds: float = setting(10.0, "how long a worker may take to accept a request before another is asked")
    queue_seconds: float = setting(30.0, "how long a request waits at the door while every worker is full; then 429")
    max_waiting: int = setting(512, "requests that may wait at the door; more are refused with 429")
    local_prefill: Literal["auto", "never"] = setting(
        "auto",
        "auto: the decode worker computes a prompt itself where that is predicted to cost less than a hand-over; "
        "never: where there is a prefill worker, it computes every prompt",
    )
    prefix_index_blocks: int = setting(
        1_000_000, "blocks of which is remembered whose cache has them, for routing; 175 bytes each"
    )
    prompt_cache_accounts: tuple[str, ...] = setting(
        (),
        "what accounts may do with prompt caches, such as team-a=off,team-b=read:512,*=on: on, read, write or off, and "
        "of how many of a prompt's leading tokens; a request can only ask for less",
    )
    public_prefixes: Path | None = setting(
        None, "folder of *.txt files, texts whose cached blocks all accounts share (system prompts); read at start"
    )
    probe_interval_seconds: float = setting(10.0, "how often readiness is proven by a request when no user's does it")
    probe_valid_seconds: float = setting(30.0, "how long one proof of readiness lasts")
    audit_seconds: float = setting(10.0, "how often the services' tables are compared in search of leaks; 0: never")
    audit_grace_seconds: float = setting(
        5.0, "how much longer than the longest lease two tables may differ before what they differ in counts as leaked"
    )
    secret: str = setting(
        "", "hex secret behind handles and cache salts; replicas share it; made once if empty", shared=True
    )
    state_dir: str = setting("", "where secret and database are kept; XDG state directory if empty", shared=True)
    database_url: str = setting(
        "",
        "where accounts and the ledger are kept: postgresql://USER:PASSWORD@HOST/DATABASE, which replicas share, or "
        "sqlite:////PATH; a SQLite file in the state directory if empty",
        secret=True,
    )
    prices: tuple[str, ...] = setting(
        DEFAULT_PRICES,
        "what models cost, as MODEL=INPUT/CACHED/OUTPUT, * for all others: US dollars for a million tokens each of the "
        "prompt's computed, of its cached and of the answer's",
    )
    models: ModelTable = setting(SHIPPED, "other names, wire formats and prices of models", shared=True, file_only=True)
    fallback_model: str = setting(
        "",
        "for development: the model that answers, with the header tandem-fallback-model, where one is asked for that "
        "is not loaded; such requests are refused if empty",
    )
    gateway_gone_seconds: float = setting(
        30.0, "silence after which another gateway on the same database closes this one's requests as aborted"
    )
    operator_token: str = setting("", "a token that may only see the fleet; `tandem up` makes its own", secret=True)
    log_json: bool | None = setting(None, "log JSON lines; decided by the terminal if unset", shared=True)
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    def __post_init__(self) -> None:
        AccountPolicies.parse(self.prompt_cache_accounts)  # raises ValueError at start rather than later
        PriceTable.parse(self.prices)
