"""Accounts, tokens, limits, gateways and the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COUNTS = (
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_pool_tokens",
    "num_store_tokens",
    "num_remote_tokens",
    "num_completion_tokens",
    "num_reprefill_tokens",
    "num_bytes_moved",
    "prefill_us",
    "decode_us",
    "microneurons",
)


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("disabled_ms", sa.BigInteger),
        sa.Column("max_requests_per_minute", sa.Integer),
        sa.Column("max_tokens_per_minute", sa.BigInteger),
        sa.Column("max_concurrent_requests", sa.Integer),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("account", sa.String(64), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("scopes", sa.String(128), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.Column("used_ms", sa.BigInteger),
    )
    op.create_index("ix_tokens_account", "tokens", ["account"])
    op.create_table(
        "gateways",
        sa.Column("incarnation", sa.String(32), primary_key=True),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_ms", sa.BigInteger),
    )
    op.create_table(
        "windows",
        sa.Column("account", sa.String(64), primary_key=True),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("state", sa.String, nullable=False),
    )
    _create_ledger()


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("account", sa.String(64), nullable=False),
        sa.Column("token_id", sa.String(32)),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("gateway", sa.String(32), nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("opened_ms", sa.BigInteger, nullable=False),
        sa.Column("closed_ms", sa.BigInteger),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("finish_reasons", sa.String(64), nullable=False, server_default=""),
        sa.Column("error", sa.String(64), nullable=False, server_default=""),
        sa.Column("num_choices", sa.Integer, nullable=False),
        sa.Column("num_asked_tokens", sa.Integer, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in _COUNTS),
        sa.CheckConstraint("num_prompt_tokens = num_computed_tokens + num_cached_tokens", name="prompt"),
        sa.CheckConstraint("num_computed_tokens >= 0 AND num_pool_tokens >= 0", name="positive"),
        sa.CheckConstraint("num_cached_tokens = num_pool_tokens + num_store_tokens + num_remote_tokens", name="cached"),
        sa.CheckConstraint("(status = 'open') = (closed_ms IS NULL)", name="closed"),
    )
    op.create_index("ix_ledger_day", "ledger", ["account", "day", "model"])
    is_open = sa.text("closed_ms IS NULL")
    op.create_index("ix_ledger_open", "ledger", ["gateway"], sqlite_where=is_open, postgresql_where=is_open)


def downgrade() -> None:
    for name in ("ledger", "windows", "gateways", "tokens", "accounts"):
        op.drop_table(name)
