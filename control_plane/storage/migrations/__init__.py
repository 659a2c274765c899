"""The history of the tables: one file per change, which alembic applies in order."""
