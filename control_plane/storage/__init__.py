"""Hard state in SQL, so that any process may be killed at any moment."""
