"""Which life of which process on which host is this?"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_incarnation() -> str:
    """Return 16 random hex digits: one life of one process."""
    return secrets.token_hex(8)


def default_host_id() -> str:
    """Return what processes have in common that can share memory and sockets: host name and boot.

    Containers have a name each and so count as hosts; equal names on two machines are told apart by the boot.
    """
    try:
        return f"{socket.gethostname()}-{_BOOT_ID.read_text()[:8]}"
    except OSError:
        return socket.gethostname()
