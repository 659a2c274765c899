"""Hosts on one machine: network namespaces with a cable between them.

A namespace belongs to a thread, and to the threads and processes that are started on that thread. It has no name, so
nothing is left of it when they have ended, however they ended.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


class NetworkHost:
    """A network, with loopback and the devices that it is given. `is_new`: made here; else that of the caller."""

    def __init__(self, name: str, address: str, *, is_new: bool = True) -> None:
        self.name = name
        self.address = address
        self._thread = ThreadPoolExecutor(1, f"host-{name}")
        self.thread_id = self.run(leave_network if is_new else threading.get_native_id)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on this host: the sockets that it opens and the processes that it starts are the host's."""
        return self._thread.submit(work).result()

    def ip(self, arguments: str) -> None:
        """Run the command `ip` here."""
        command = ["ip", *arguments.split()]
        done = self.run(lambda: subprocess.run(command, capture_output=True, text=True, check=False))
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def close(self) -> None:
        self._thread.shutdown()


def join(a: NetworkHost, b: NetworkHost) -> None:
    """Lay a cable between two hosts."""
    for host in (a, b):
        host.ip("link set lo up")
    a.ip(f"link add cable type veth peer name cable netns /proc/{os.getpid()}/task/{b.thread_id}/ns/net")
    for host, other in ((a, b), (b, a)):
        host.ip(f"address add {host.address}/24 dev cable")
        host.ip("link set cable up")
        host.ip(f"route add default via {other.address}")  # a gateway names its address on this route in tokens


def why_not() -> str:
    """Return why no network can be made here; "" if one can."""
    if shutil.which("ip") is None:
        return "there is no command `ip`; install iproute2"
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(leave_network).result()
        except PermissionError as error:
            return f"network namespaces need root (CAP_SYS_ADMIN): {error}"
    return ""


def leave_network() -> int:
    """Move the calling thread into a new, empty network; return the thread's id."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return threading.get_native_id()
