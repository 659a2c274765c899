"""Measures what a routing decision costs a gateway."""
