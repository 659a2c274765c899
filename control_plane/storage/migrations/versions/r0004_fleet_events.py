"""What the fleet decided, kept for some days."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fleet_events",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("severity", sa.String(8), nullable=False),
        sa.Column("worker", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    for name in ("kind", "severity", "worker", "name"):
        op.create_index(f"ix_fleet_events_{name}", "fleet_events", [name, "number"])


def downgrade() -> None:
    op.drop_table("fleet_events")
