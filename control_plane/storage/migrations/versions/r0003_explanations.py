"""Explanations of requests, kept for some hours."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "explanations",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("account", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("ix_explanations_created_ms", "explanations", ["created_ms"])
    op.create_index("ix_explanations_account", "explanations", ["account", "created_ms"])


def downgrade() -> None:
    op.drop_table("explanations")
