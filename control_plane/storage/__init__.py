"""Hard state: what a control plane keeps in SQL, so that any process may be killed at any moment."""
