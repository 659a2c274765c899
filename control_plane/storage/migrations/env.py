"""Gives alembic the connection of control_plane.storage.migrate."""

from __future__ import annotations

from alembic import context

from control_plane.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, compare_type=True)
context.run_migrations()
