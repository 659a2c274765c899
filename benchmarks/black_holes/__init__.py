"""Measures what sick workers cost the clients of a gateway."""
