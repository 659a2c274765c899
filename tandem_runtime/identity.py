"""Makes incarnation ids and host ids."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_incarnation() -> str:
    """Return 16 random hex digits that name one life of one process."""
    return secrets.token_hex(8)


def default_host_id() -> str:
    """Return the id of this host: host name and boot id. Processes with one host id can share memory and sockets.

    Each container has its own name and counts as a host. The boot id separates machines of one name.
    """
    try:
        return f"{socket.gethostname()}-{_BOOT_ID.read_text()[:8]}"
    except OSError:
        return socket.gethostname()
