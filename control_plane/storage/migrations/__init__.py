"""How did the tables come to be as they are? One file per change, applied in order by alembic."""
