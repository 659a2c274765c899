"""Knows where Tandem runs."""

from __future__ import annotations

import platform
import sys

_PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")


def unsupported() -> str:
    """Return why Tandem does not run on this machine, "" if it does."""
    here = f"{platform.system()} on {platform.machine()}"
    if sys.platform != "linux" or platform.machine().lower() not in _PROCESSORS:
        return f"Tandem runs on Linux, x86-64 or arm64; this is {here}. Use a Linux machine, a VM or a container"
    return ""
