"""Defines the errors by which an engine process refuses to start."""


class ModelUnusable(ValueError):
    """This checkpoint cannot be served; the message names the reason and the remedy."""
