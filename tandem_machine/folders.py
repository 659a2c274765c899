"""Finds the home folder of this process's user, who may have none: a container's user often is a number alone."""

from __future__ import annotations

from pathlib import Path


def home_folder() -> Path | None:
    """Return the home folder by HOME, else by the user's entry in passwd; None without either."""
    try:
        return Path.home()
    except RuntimeError:
        return None
