"""States where processes of other machines reach a gateway's enrolment port, for join tokens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from tandem_runtime.enrolment.join_token import checked_addresses
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.server import split_address

JOIN_FOLDER = "join"
"""In the state directory of a gateway: join tokens for processes of its machine, and its addresses."""

ADDRESSES = "addresses"
"""The file beside the local join tokens that names the addresses of the gateway that wrote it."""

_DOCUMENTATION_NET = ("192.0.2.1", 9)
"""RFC 5737. Connecting a UDP socket sends nothing; it tells which of our addresses the default route uses."""


def advertised(listen: str, configured: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses for join tokens; `listen` has the real port. Raise InvalidRequest for malformed ones.

    A gateway that listens on all addresses names its address on the default route, and its host name.
    """
    if configured:
        return checked_addresses(list(configured))
    host, port = split_address(listen)
    if not _is_wildcard(host):
        return (listen,)
    return tuple(f"{name}:{port}" for name in dict.fromkeys((*_routed_address(), socket.gethostname())))


def local_address(listen: str) -> str:
    """Return where processes of this machine connect."""
    host, port = split_address(listen)
    if not _is_wildcard(host):
        return listen
    return f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}"


def known_addresses(folder: Path) -> list[str]:
    """Return what the last gateway of this state directory wrote into `folder`; [] if there was none."""
    try:
        return (folder / ADDRESSES).read_text().split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {folder / ADDRESSES}: {error}; pass --address HOST:PORT") from error


def is_this_machine_only(addresses: Sequence[str]) -> bool:
    """Return whether no other machine can use any of `addresses`."""
    return all(_is_loopback(split_address(address)[0]) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _routed_address() -> tuple[str, ...]:
    """Return this machine's address on the default route, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_DOCUMENTATION_NET)
        except OSError:  # no route: a machine without a network, or with IPv6 only
            return ()
        return (str(probe.getsockname()[0]),)
