"""Seams between numerics classes, counted in each row of the ledger.

A gateway of the revision before this one goes on with these tables: the column has a default.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("num_seams", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("ledger", "num_seams")
