"""Defines the errors of an engine process that are not about one request."""


class ModelUnusable(ValueError):
    """This checkpoint cannot be served; the message names the reason and the remedy."""


class RegionError(ValueError):
    """A region is not mapped, or a slot was reused while it was read."""


class CorruptBlock(RegionError):
    """The bytes that were read differ from those that were written."""
