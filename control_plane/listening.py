"""Opens the HTTP socket, and limits what a client that does not read can cost.

The kernel buffers little for such a client, and closes a connection that takes nothing at all.
"""

from __future__ import annotations

import resource
import socket

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.server import is_loopback, split_address

_MAX_UNSENT_BYTES = 128 * 1024
"""Per connection, in the kernel: some thousand events. The kernel's default is megabytes."""
_MAX_OPEN_FILES = 1 << 16


async def listen(address: str, *, insecure: bool, reuse_port: bool, stalled_client_seconds: float) -> socket.socket:
    """Return a bound socket; raises InvalidRequest beyond loopback and where the port is taken."""
    host, port = split_address(address)
    if not insecure and not await is_loopback(host):
        raise InvalidRequest(
            f"--listen {address} is beyond loopback and the connection is not encrypted; "
            "listen on 127.0.0.1, or set --insecure-http if a proxy in front encrypts or the network is trusted"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio leaves Nagle's algorithm on: a write in two parts would wait 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        _set_options(bound, reuse_port, stalled_client_seconds)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        shared = "" if reuse_port else ", or set --reuse-port for every process that listens there"
        raise InvalidRequest(
            f"cannot listen on {address}: {error.strerror}; stop the process that does, or choose another port{shared}"
        ) from error
    bound.set_inheritable(True)
    return bound


def _set_options(bound: socket.socket, reuse_port: bool, stalled_client_seconds: float) -> None:
    """Set the options that accepted connections inherit."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; RFC 5482; also applies while the client's window is closed
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stalled_client_seconds))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)


def allow_many_connections() -> int:
    """Raise this process's limit of open files (often 1024) to 65,536, or to the hard limit if that is lower.

    Return the limit then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
