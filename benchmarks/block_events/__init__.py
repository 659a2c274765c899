"""Measures what block events of a large fleet cost a gateway."""
