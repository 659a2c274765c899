"""Defines the settings of a control-plane process."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from control_plane.accounts.prices import DEFAULT_PRICES, PriceTable
from control_plane.admission.budgets import DEFAULT_BUDGETS, BudgetTable
from control_plane.fleet.worker_addresses import parse_networks
from control_plane.generation import DEFAULT_GRAIN, AccountPolicies
from tandem_runtime import plaintext_settings
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.plaintext_settings import HandleSettings
from tandem_runtime.server import split_address
from tandem_runtime.settings import setting

_POSITIVE = (
    "max_body_bytes",
    "max_bodies_bytes",
    "max_account_bodies_bytes",
    "body_stall_seconds",
    "body_seconds",
    "max_head_bytes",
    "head_seconds",
    "max_connections",
    "max_unfinished_heads",
    "explain_rows",
    "events_days",
    "events_rows",
    "hash_grain",
)
_MIN_CERTIFICATE_SECONDS = 10
_MAX_CERTIFICATE_SECONDS = 30 * 86_400
_LAST_PORT = 65_535


@dataclass(frozen=True)
class ControlPlaneSettings(HandleSettings):
    """Settings of one control-plane process; each field is a flag, a variable and a key of tandem.toml."""

    listen: str = setting("127.0.0.1:8642", "address of the HTTP gateway")
    grpc_listen: str = setting("127.0.0.1:8643", "address that workers register at")
    enrolment_listen: str = setting(
        "",
        "address that processes join the fleet at, over TLS; the host of --grpc-listen and the next port if empty",
    )
    enrolment_advertise: tuple[str, ...] = setting(
        (),
        "addresses of the enrolment port for other machines, written into join tokens; by --enrolment-listen if empty",
    )
    certificate_seconds: float = setting(86_400.0, "seconds that certificates are valid; renewed after half of them")
    replicas: tuple[str, ...] = setting((), "gRPC addresses of all control-plane processes, this one included")
    worker_networks: tuple[str, ...] = setting(
        (),
        "networks, such as 10.0.0.0/8, whose addresses workers and KV services may register beside those of their own "
        "host: for processes behind address translation, or with several interfaces",
    )
    insecure: bool = plaintext_settings.insecure()
    tls_cert: str = setting(
        "",
        "PEM file of this process's certificate, leaf first; with --tls-key and --tls-ca, gRPC is encrypted and both "
        "sides are verified",
    )
    tls_key: str = setting("", "PEM file of the private key of --tls-cert")
    tls_ca: str = setting("", "PEM file of the trusted certificate authorities, one or two")
    insecure_plaintext: bool = plaintext_settings.insecure_plaintext()
    insecure_http: bool = setting(
        False, "allow HTTP beyond loopback in plain text, for a proxy in front that encrypts; gRPC stays encrypted"
    )
    plaintext_until: str = plaintext_settings.plaintext_until()
    grpc_reflection: bool = setting(
        False, "describe the gRPC methods to those who may call them, for tools such as grpcurl", shared=True
    )
    reuse_port: bool = setting(
        False, "share the HTTP port with other gateways of this host that set this too; the kernel spreads connections"
    )
    request_timeout_seconds: float = setting(600.0, "deadline of a request")
    max_body_bytes: int = setting(10_000_000, "largest request body; more is answered with 413")
    max_bodies_bytes: int = setting(
        256 * 1024 * 1024,
        "bytes of all request bodies that are not prepared yet; more are answered with 503, those that do not move "
        "first",
    )
    max_account_bodies_bytes: int = setting(
        40 * 1024 * 1024, "bytes of one account's request bodies that are not prepared yet; more are answered with 429"
    )
    body_stall_seconds: float = setting(
        10.0, "seconds without a byte of a request body, after which it is answered with 408"
    )
    min_body_bytes_per_second: int = setting(
        1024, "average speed of a request body, checked after body_stall_seconds; a slower one is answered with 408"
    )
    body_seconds: float = setting(120.0, "seconds that a request body may take in all; more is answered with 408")
    max_head_bytes: int = setting(65_536, "largest head of a request, URL included; more is answered with 431")
    head_seconds: float = setting(
        10.0, "seconds until the head of a request is complete; then 408, or no answer if no byte has come"
    )
    max_connections: int = setting(
        16_384,
        "most connections of HTTP clients, or as many as the process may open files; more are answered with 503",
    )
    max_unfinished_heads: int = setting(
        64,
        "most connections of one address whose head is incomplete after a second; the oldest are answered with 429",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host names of proxies in front of this gateway; if it listens on loopback, or if this is set, a request for "
        "another host than these and this machine's names is refused; * for any",
    )
    forwarded_allow_ips: tuple[str, ...] = setting(
        (),
        "addresses or networks of proxies in front of this gateway whose X-Forwarded-For and X-Forwarded-Proto are "
        "believed; * for any; nobody's if empty",
    )
    text_processes: int = setting(
        0, "processes that prepare bodies above 64 KiB; 0: as many as the cores, at least 3 and at most 8"
    )
    text_cpu_seconds: float = setting(2.0, "processor seconds to prepare a body of any size; more is answered with 400")
    text_cpu_seconds_per_mb: float = setting(3.0, "processor seconds more for each megabyte of the body")
    text_memory_mb: int = setting(
        256, "MiB of memory to prepare one body of 0.75 MB or more, a quarter of them for a short one; more: 400"
    )
    text_account_mb: int = setting(
        10, "megabytes of one account's bodies that are prepared at a time; a larger body is prepared alone"
    )
    tokenizer_cache_bytes: int = setting(
        256 * 1024 * 1024,
        "bytes of tokenizer files that are kept of models that no worker serves any more; the least recently used are "
        "dropped first; those of served models are always kept",
    )
    text_max_waiting: int = setting(512, "bodies that may wait to be prepared; more are refused with 429")
    text_max_waiting_mb: int = setting(
        128, "megabytes of bodies that may wait to be prepared; more are refused with 429"
    )
    max_unread_tokens: int = setting(
        8192, "tokens of a request that may wait for a slow client; with more waiting, the request is aborted"
    )
    stalled_client_seconds: float = setting(
        60.0,
        "seconds after which a connection that takes no data is closed and its request cancelled",
    )
    drain_seconds: float | None = setting(
        None,
        "most seconds for running requests to finish after SIGTERM; then they end with an error that says so; if "
        "unset, --request-timeout-seconds: the longest that a request may take",
    )
    suspect_seconds: float = setting(3.0, "seconds without a heartbeat after which a worker gets no new requests")
    gone_seconds: float = setting(5.0, "seconds without a heartbeat after which a worker is forgotten")
    accept_seconds: float = setting(
        10.0, "seconds a worker may take to accept a request before the next worker is tried"
    )
    queue_seconds: float = setting(
        30.0,
        "seconds a request waits in the admission queue while every worker of its model is full, then 429; --budgets "
        "may be shorter",
    )
    max_waiting: int = setting(512, "requests that may wait for one model; more are refused with 429")
    max_waiting_per_account: int = setting(
        0,
        "requests of one account that may wait for one model, once there are accounts; 0: half of --max-waiting, at "
        "least 1; more are refused with 429",
    )
    budgets: tuple[str, ...] = setting(
        DEFAULT_BUDGETS,
        "budgets as MODEL=FIRST/NEXT, * for all others. FIRST: seconds; a request that is predicted to wait for more "
        "than half of them gets 429 at once, one that has waited for 0.9 of them gets 429 then; 0: --queue-seconds "
        "instead. NEXT: seconds per token of a worker's answers, beyond which no more are sent there; 0: no bound",
    )
    priority_accounts: tuple[str, ...] = setting(
        (), "accounts whose requests with service_tier priority are served before others; * for all"
    )
    local_prefill: Literal["auto", "never"] = setting(
        "auto",
        "auto: the decode worker computes a prompt itself if that is predicted to cost less than a hand-over; "
        "never: if there is a prefill worker, it computes every prompt",
    )
    prefix_index_blocks: int = setting(10_000_000, "blocks in the router's index of caches; 3.5 bytes each")
    hash_grain: int = setting(
        DEFAULT_GRAIN,
        "tokens per hash of a prompt, the same at all gateways; a worker gets requests only if its block size is a "
        "multiple",
    )
    prompt_cache_accounts: tuple[str, ...] = setting(
        (),
        "prompt cache policy per account, such as team-a=off,team-b=read:512,*=on: on, read, write or off, with an "
        "optional limit in leading prompt tokens; a request can only ask for less",
    )
    strict_fields: bool = setting(
        False, "refuse also the request fields that clients send by habit and that change nothing, such as user"
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
    hmac_handles_until: str = plaintext_settings.hmac_handles_until()
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
    report_seconds: float = setting(
        15.0, "seconds that the database may take for a report of usage; a longer one is answered with 408"
    )
    operator_token: str = setting(
        "", "a token that may only read the fleet's state; `tandem up` generates its own", secret=True
    )
    loop_stall_seconds: float = setting(
        0.05,
        "seconds that the event loop may stand still before a log line names the code that stopped it; 0: never",
        shared=True,
    )
    log_json: bool | None = setting(None, "log JSON lines; if unset, unless stderr is a terminal", shared=True)
    explain_hours: float = setting(
        24.0, "hours that explanations of requests are kept in the database; 0: only the latest, in memory"
    )
    explain_rows: int = setting(100_000, "rows of explanations that the database keeps at most, the newest")
    explain_texts: bool = setting(
        False, "explanations have the beginning of the prompt and of the answer; the database then holds users' texts"
    )
    events_days: float = setting(7.0, "days that the fleet's events are kept in the database")
    events_rows: int = setting(200_000, "events that the database keeps at most, the newest")
    metrics_listen: str = setting(
        "127.0.0.1:0",
        "address of the metrics (GET /metrics); port 0 takes a free one; beyond loopback over TLS; off if empty",
        shared=True,
    )
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    @property
    def longest_drain_seconds(self) -> float:
        """Most seconds for running requests to finish after SIGTERM. Supervisors wait longer than that."""
        return self.request_timeout_seconds if self.drain_seconds is None else self.drain_seconds

    @property
    def enrolment_address(self) -> str:
        """The address to listen on for enrolment. Raise InvalidRequest if --grpc-listen is no address."""
        if self.enrolment_listen:
            return self.enrolment_listen
        if self.grpc_listen.startswith("unix:"):
            return "127.0.0.1:8644"
        host, port = split_address(self.grpc_listen)
        return f"{host}:{_next_port(port)}"

    def __post_init__(self) -> None:
        _check_networks("forwarded_allow_ips", self.forwarded_allow_ips)
        AccountPolicies.parse(self.prompt_cache_accounts)  # raises ValueError at start rather than later
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0; leave it out for the default")
        for name in ("max_bodies_bytes", "max_account_bodies_bytes"):
            if getattr(self, name) >= self.max_body_bytes:
                continue
            raise ValueError(
                f"{name} is {getattr(self, name):,}, less than the {self.max_body_bytes:,} of one body; "
                "raise it, or lower max_body_bytes"
            )
        for name in ("max_waiting", "max_waiting_per_account", "tokenizer_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 or more; leave it out for the default")
        if not 0 <= self.longest_drain_seconds < float("inf"):
            raise ValueError(
                f"drain_seconds is {self.longest_drain_seconds:g}, must be 0 or more; leave it out for the longest "
                "that a request may take"
            )
        if not self.events_days < float("inf"):
            raise ValueError(f"events_days is {self.events_days:g}, must be a number of days; leave it out for a week")
        if not 0 <= self.explain_hours < float("inf"):
            raise ValueError(f"explain_hours is {self.explain_hours:g}, must be 0 or more; leave it out for a day")
        PriceTable.parse(self.prices)
        BudgetTable.parse(self.budgets)
        if not _MIN_CERTIFICATE_SECONDS <= self.certificate_seconds <= _MAX_CERTIFICATE_SECONDS:
            raise ValueError(
                f"certificate_seconds is {self.certificate_seconds:g}, must be {_MIN_CERTIFICATE_SECONDS} to "
                f"{_MAX_CERTIFICATE_SECONDS:,} (30 days); leave it out for a day"
            )
        _ = self.macs_until  # raises ValueError at start rather than later
        parse_networks(self.worker_networks)


def _next_port(port: int) -> int:
    """Return the enrolment port beside a gRPC port: the next one, or the one before the last; 0 (any) for 0."""
    return port - 1 if port == _LAST_PORT else port and port + 1


def _check_networks(name: str, entries: Sequence[str]) -> None:
    for entry in entries:
        try:
            if entry != "*":
                ipaddress.ip_network(entry)
        except ValueError as error:
            raise ValueError(
                f"{name} has {entry!r}, which is no address or network ({error}); write 10.0.0.7, 10.0.0.0/8 or *"
            ) from error
