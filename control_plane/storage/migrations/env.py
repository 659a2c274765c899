"""How does alembic reach the database? Through the connection that control_plane.storage.migrate gives it."""

from __future__ import annotations

from alembic import context

from control_plane.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, compare_type=True)
context.run_migrations()
