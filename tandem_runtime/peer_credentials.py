"""Reads who is at the other end of a Unix socket, and refuses other users (SO_PEERCRED, unix(7)).

The folders of our sockets are closed to other users. This is the second lock: it holds where a folder's mode was
changed, or where root made the socket.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from tandem_runtime.errors import Unauthenticated

_UCRED = struct.Struct("=iII")  # struct ucred: pid_t, uid_t, gid_t
_ROOT = 0


@dataclass(frozen=True)
class PeerCredentials:
    """The process that connected, or that listens; as the kernel saw it then."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return who is at the other end of a connected Unix socket."""
    return PeerCredentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def check_own_user(sock: socket.socket, what: str) -> PeerCredentials:
    """Return the peer's credentials; raises Unauthenticated unless it runs as this process's user or as root."""
    peer, own = peer_credentials(sock), os.geteuid()
    if peer.uid not in (own, _ROOT):
        raise Unauthenticated(
            f"process {peer.pid} of user {peer.uid} is at the other end of {what}; only user {own} and root may be: "
            f"run all processes of a host as one user",
            field="uid",
        )
    return peer
