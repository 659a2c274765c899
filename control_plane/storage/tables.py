"""The tables, and the meaning of each column.

All times are integers, milliseconds since 1970 in UTC, on SQLite and PostgreSQL alike. Names end in their unit.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData(
    naming_convention={"ix": "ix_%(column_0_N_label)s", "ck": "ck_%(table_name)s_%(constraint_name)s"},
)

accounts = Table(
    "accounts",
    metadata,
    Column("id", String(64), primary_key=True),  # in URLs and in cache salts; it never changes
    Column("created_ms", BigInteger, nullable=False),
    Column("disabled_ms", BigInteger),
    Column("max_requests_per_minute", Integer),  # null: no limit
    Column("max_tokens_per_minute", BigInteger),
    Column("max_concurrent_requests", Integer),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("account", String(64), ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", String(128), nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),  # SHA-256 of the token
    Column("scopes", String(128), nullable=False),  # separated by spaces
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger),
    Column("revoked_ms", BigInteger),
    Column("used_ms", BigInteger),  # to the minute
)

gateways = Table(
    "gateways",
    metadata,
    Column("incarnation", String(32), primary_key=True),
    Column("started_ms", BigInteger, nullable=False),
    Column("seen_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),  # it drained, or was declared lost
)

windows = Table(
    "windows",
    metadata,
    Column("account", String(64), primary_key=True),
    Column("revision", String(32), nullable=False),  # of the last write; a write names the revision that it is based on
    Column("state", String, nullable=False),  # control_plane.accounts.limits.Window as JSON
)

ledger = Table(
    "ledger",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("account", String(64), nullable=False),  # no foreign key: without accounts it is the URL's account
    Column("token_id", String(32)),
    Column("model", String(256), nullable=False),
    Column("gateway", String(32), nullable=False),  # the incarnation that opened the row and closes it
    Column("day", Integer, nullable=False),  # of the opening, days since 1970 in UTC
    Column("opened_ms", BigInteger, nullable=False),
    Column("closed_ms", BigInteger),
    Column("status", String(16), nullable=False),  # open, finished, failed, cancelled, aborted
    Column("finish_reasons", String(64), nullable=False, server_default=""),  # of the choices that ended
    Column("error", String(64), nullable=False, server_default=""),
    Column("num_choices", Integer, nullable=False),
    Column("num_asked_tokens", Integer, nullable=False),  # the prompt's length, whether it was read or not
    *(
        Column(name, BigInteger, nullable=False, server_default="0")
        for name in (
            "num_prompt_tokens",  # read by workers: computed + cached
            "num_computed_tokens",
            "num_cached_tokens",  # pool + store + remote
            "num_pool_tokens",  # found in the worker's own KV pool
            "num_store_tokens",  # copied from its host's store
            "num_remote_tokens",  # fetched into that store from another host's
            "num_completion_tokens",
            "num_reprefill_tokens",  # computed by decode although prefill had computed them
            "num_bytes_moved",
            "prefill_us",
            "decode_us",
            "microneurons",
            "num_seams",  # places in the answer where the tokens of another numerics class begin
        )
    ),
    CheckConstraint("num_prompt_tokens = num_computed_tokens + num_cached_tokens", name="prompt"),
    CheckConstraint("num_computed_tokens >= 0 AND num_pool_tokens >= 0", name="positive"),
    CheckConstraint("num_cached_tokens = num_pool_tokens + num_store_tokens + num_remote_tokens", name="cached"),
    CheckConstraint("(status = 'open') = (closed_ms IS NULL)", name="closed"),
    Index("ix_ledger_day", "account", "day", "model"),
    Index(
        "ix_ledger_open",
        "gateway",
        sqlite_where=text("closed_ms IS NULL"),
        postgresql_where=text("closed_ms IS NULL"),
    ),
)

explanations = Table(
    "explanations",
    metadata,
    Column("request_id", String(80), primary_key=True),  # as in the ledger
    Column("account", String(64), nullable=False),
    Column("model", String(256), nullable=False),  # "" if no model was found
    Column("state", String(16), nullable=False),  # finished, failed, cancelled
    Column("created_ms", BigInteger, nullable=False, index=True),  # of the request's head
    Column("summary", Text, nullable=False),  # its row of GET /v1/requests, JSON
    Column("document", Text, nullable=False),  # GET /v1/requests/{id}/explain, JSON of 16 KiB at most
    Index("ix_explanations_account", "account", "created_ms"),
)

authorities = Table(
    "authorities",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),  # 1 is made once: two gateways make one fleet
    Column("fleet", String(16), nullable=False),  # equal in all rows; 16 hex digits
    Column("certificate", LargeBinary, nullable=False),  # DER
    Column("sealed_key", LargeBinary),  # control_plane.fleet_identity.sealed_key; null once it has left
    Column("created_ms", BigInteger, nullable=False),
    Column("issues_from_ms", BigInteger),  # null: it is trusted, but issues nothing yet
    Column("leaves_ms", BigInteger),  # no longer trusted from then on; null: it stays
)

members = Table(
    "members",
    metadata,
    Column("id", String(16), primary_key=True),  # made by the authority; a part of the process's name
    Column("role", String(16), nullable=False),
    Column("host", String(64), nullable=False),  # as the process calls it; for lists only
    Column("join_token", String(16)),  # null: a gateway
    Column("joined_key", LargeBinary(32), nullable=False),  # SHA-256 of its first public key
    Column("joined_ms", BigInteger, nullable=False),
    Column("revoked_ms", BigInteger),
    Index("ix_members_join", "join_token", "joined_key"),
)

certificates = Table(
    "certificates",
    metadata,
    Column("serial", String(40), primary_key=True),  # hex
    Column("member", String(16), ForeignKey("members.id"), nullable=False, index=True),
    Column("key", LargeBinary(32), nullable=False),  # SHA-256 of the public key
    Column("authority", Integer, nullable=False),
    Column("bundle", Integer, nullable=False),  # number of the trust bundle that the process got with it
    Column("issued_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
)

join_tokens = Table(
    "join_tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),  # SHA-256 of the secret part
    Column("role", String(16), nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("max_uses", Integer, nullable=False),
    Column("num_uses", Integer, nullable=False, server_default="0"),
    Column("num_failures", Integer, nullable=False, server_default="0"),  # wrong secrets with this id
)

denials = Table(
    "denials",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # without gaps, in the order of commits
    Column("identity", String(64), nullable=False, index=True),  # a URI; "" in a row that only moves the numbers on
    Column("denied_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),  # then its last certificate has expired, and renews no more
)

fleet_events = Table(
    "fleet_events",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # without gaps, in the order of commits
    Column("time_ms", BigInteger, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("worker", String(128), nullable=False),  # its id; "" if the event is about none
    Column("name", String(128), nullable=False),  # the worker's --worker-id
    Column("document", Text, nullable=False),  # control_plane.events.event.Event as JSON; its id is the number
    *(Index(f"ix_fleet_events_{name}", name, "number") for name in ("kind", "severity", "worker", "name")),
)
