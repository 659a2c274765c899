"""The fleet's certificate authorities, members, join tokens and deny list."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "authorities",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("fleet", sa.String(16), nullable=False),
        sa.Column("certificate", sa.LargeBinary, nullable=False),
        sa.Column("sealed_key", sa.LargeBinary),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("issues_from_ms", sa.BigInteger),
        sa.Column("leaves_ms", sa.BigInteger),
    )
    op.create_table(
        "members",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("host", sa.String(64), nullable=False),
        sa.Column("join_token", sa.String(16)),
        sa.Column("joined_key", sa.LargeBinary(32), nullable=False),
        sa.Column("joined_ms", sa.BigInteger, nullable=False),
        sa.Column("revoked_ms", sa.BigInteger),
    )
    op.create_index("ix_members_join", "members", ["join_token", "joined_key"])
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(40), primary_key=True),
        sa.Column("member", sa.String(16), sa.ForeignKey("members.id"), nullable=False),
        sa.Column("key", sa.LargeBinary(32), nullable=False),
        sa.Column("authority", sa.Integer, nullable=False),
        sa.Column("bundle", sa.Integer, nullable=False),
        sa.Column("issued_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_certificates_member", "certificates", ["member"])
    op.create_table(
        "join_tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("max_uses", sa.Integer, nullable=False),
        sa.Column("num_uses", sa.Integer, nullable=False, server_default="0"),
        sa.Column("num_failures", sa.Integer, nullable=False, server_default="0"),
    )
    op.create_table(
        "denials",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("denied_ms", sa.BigInteger, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_denials_identity", "denials", ["identity"])


def downgrade() -> None:
    for name in ("denials", "join_tokens", "certificates", "members", "authorities"):
        op.drop_table(name)
