"""Makes incarnation ids, host ids and the ids of processes that are given none."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_incarnation() -> str:
    """Return 16 random hex digits that name one life of one process."""
    return secrets.token_hex(8)


def default_worker_id(role: str, host_id: str, incarnation: str) -> str:
    """Return the id of a process that has none of a certificate or a setting.

    Host id and process id are not enough: containers with the host's network have one host id, and a process id 1 each.
    """
    return f"{role}-{host_id}-{os.getpid()}-{incarnation[:4]}"


def default_host_id() -> str:
    """Return the id of this host: host name and boot id. Processes with one host id can share memory and sockets.

    Each container has its own name and counts as a host. The boot id separates machines of one name.
    """
    try:
        return f"{socket.gethostname()}-{_BOOT_ID.read_text()[:8]}"
    except OSError:
        return socket.gethostname()
