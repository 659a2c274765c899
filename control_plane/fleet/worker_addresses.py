"""Decides which addresses a process may register: those of its own host, and of the networks that a setting allows.

A gateway dials what is registered, and sends prompts there. So the address must be one of the host that the call came
from. A call from this machine, over loopback or not, may name any of this machine's addresses. Of a name with IPv4 and
IPv6 addresses those of the caller's kind count.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import unquote

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.server import split_address

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_RESOLVE_SECONDS = 2.0


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Return the networks of `--worker-networks`; raises ValueError with the accepted form."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise ValueError(f"worker_networks: {error}; give networks such as 10.0.0.0/8 or fd00::/8") from error


class WorkerAddresses:
    """The rule of one gateway."""

    def __init__(self, allowed: Sequence[Network] = ()) -> None:
        self._allowed = tuple(allowed)

    async def check(self, address: str, peer: str, field: str = "info.address") -> None:
        """Raise InvalidRequest unless the caller `peer` (as gRPC names it) may register `address`."""
        try:
            host, port = split_address(address)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error.message}", field=field) from error
        if not port:
            raise InvalidRequest(f"{field} {address!r} has port 0; give the port that others dial", field=field)
        caller = peer_ip(peer)
        found = await _ips_of(host.strip("[]"), address, field)
        for ip in [ip for ip in found if caller is not None and ip.version == caller.version] or found:
            if not self._is_allowed(ip, caller):
                raise InvalidRequest(
                    f"{field} {address!r} is at {ip}, the call came from {caller or peer}: a process may register "
                    "addresses of its own host only; set --advertise on it, or --worker-networks on the gateways",
                    field=field,
                )

    def _is_allowed(self, ip: Ip, caller: Ip | None) -> bool:
        if ip.is_unspecified or ip.is_multicast:
            return False
        if ip == caller or any(ip in network for network in self._allowed):
            return True
        is_local = caller is None or caller.is_loopback or _is_of_this_machine(caller)
        return is_local and _is_of_this_machine(ip)


def peer_ip(peer: str) -> Ip | None:
    """Return the address in gRPC's name of a peer, `ipv4:1.2.3.4:5` or `ipv6:[::1]:5`; None for a Unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return _plain(ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0]))


def _plain(ip: Ip) -> Ip:
    """Return an IPv4 address that came mapped into IPv6 as itself."""
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


async def _ips_of(host: str, address: str, field: str) -> list[Ip]:
    try:
        return [_plain(ipaddress.ip_address(host))]
    except ValueError:
        pass  # a name
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
        raise InvalidRequest(
            f"{field} {address!r} cannot be resolved here: {error or 'no answer'}; give an address that the gateways "
            "can dial",
            field=field,
        ) from error
    return [_plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found]


def _is_of_this_machine(ip: Ip) -> bool:
    """Return whether one of this machine's interfaces has the address: the kernel binds no other."""
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True
