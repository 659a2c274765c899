"""Reads names of numerics classes: equal names promise equal bits, unless the name contains `batch-dependent`."""

BATCH_DEPENDENT = "batch-dependent"
"""Part of the name of a class whose rounding depends on the other requests of a step."""


def gives_equal_bits(numerics_class: str) -> bool:
    """Return whether two workers of this class give the same tokens for the same request (law 3)."""
    return BATCH_DEPENDENT not in numerics_class
