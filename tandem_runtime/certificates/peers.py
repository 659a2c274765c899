"""Admits peers by their certificates, and closes what they have open when they are revoked or expire.

TLS looks at a certificate in the handshake only; a stream or socket may outlive it by days. So each server and each
channel registers what it has open here, by id:

    denied     closed at once, by the deny list's listener
    expired    closed within SWEEP_SECONDS, unless the identity has meanwhile shown a newer certificate on any
               connection to this process: a renewal breaks no stream

The date counts when a certificate is seen first, and from then on the seconds that pass: a machine's clock that is set
an hour ahead closes nothing. (The next handshakes go by the new date, and all processes renew.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tandem_runtime.certificates.deny_list import DenyList
from tandem_runtime.certificates.names import Identity, identity_in, parse_certificate
from tandem_runtime.errors import PeerUnauthenticated, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

SWEEP_SECONDS = 0.5

Close = Callable[[TandemError], None]


def seconds_since_boot() -> float:
    """Return a time that goes on while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection: what its certificate states. `expires_at` is in Unix seconds."""

    identity: Identity
    serial: int
    expires_at: float


@lru_cache(maxsize=4096)
def peer_of(certificate: bytes) -> Peer:
    """Return the peer of a certificate (PEM or DER) that TLS has verified; raises ValueError."""
    parsed = parse_certificate(certificate)
    return Peer(identity_in(parsed), parsed.serial_number, parsed.not_valid_after_utc.timestamp())


@dataclass(frozen=True)
class _Seen:
    """When a certificate expires: by `elapsed`, and as it says itself, in Unix seconds."""

    valid_until: float
    expires_at: float

    def is_needed(self, now: float, date: float) -> bool:
        return self.valid_until > now or self.expires_at > date


class Opened:
    """A stream, call or socket of one identity. `end` it when it has ended by itself."""

    def __init__(self, owner: Peers, identity: Identity, close: Close, *, is_server: bool) -> None:
        self.identity = identity
        self.is_server = is_server
        self._owner = owner
        self._close = close

    def end(self) -> None:
        self._owner.forget(self)

    def close(self, reason: TandemError) -> None:
        self._close(reason)


class Peers:
    """What this process has open with each identity; on one event loop."""

    def __init__(
        self,
        fleet: str,
        denied: DenyList,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = seconds_since_boot,
    ) -> None:
        """`clock` gives Unix seconds; `elapsed` seconds since some moment, which only go on."""
        self._fleet = fleet
        self._denied = denied
        self._clock = clock
        self._elapsed = elapsed
        self._opened: dict[str, dict[Opened, None]] = {}
        self._seen: dict[str, dict[int, _Seen]] = {}
        """By id and serial number of a certificate."""
        denied.listen(self._deny)

    def admit(self, certificate: bytes | None) -> Peer:
        """Return the peer of a verified certificate; raises PeerUnauthenticated if it may not talk to this fleet."""
        if not certificate:
            raise PeerUnauthenticated("the caller has no certificate; enrol it with a token of `tandem fleet token`")
        try:
            peer = peer_of(certificate)
        except ValueError as error:
            raise PeerUnauthenticated(f"the caller's certificate names no process of a fleet: {error}") from error
        self.check(peer.identity)
        now, seen = self._elapsed(), self._seen.setdefault(peer.identity.id, {})
        if peer.serial not in seen:
            seen[peer.serial] = _Seen(now + peer.expires_at - self._clock(), peer.expires_at)
        if all(each.valid_until <= now for each in seen.values()):
            raise _expired(peer.identity)
        return peer

    def check(self, identity: Identity) -> None:
        """Raise PeerUnauthenticated for another fleet's identity and for a revoked one."""
        if identity.fleet != self._fleet:
            raise PeerUnauthenticated(f"{identity} is of fleet {identity.fleet}, this is fleet {self._fleet}")
        if identity in self._denied:
            raise _revoked(identity)

    def accepted(self, identity: Identity, close: Close) -> Opened:
        """Register what an admitted client has open here; `close` is called on the event loop, at most once."""
        return self._add(Opened(self, identity, close, is_server=True))

    def dialled(self, identity: Identity, close: Close) -> Opened:
        """Register what this process has open at a server of `identity`: closed when revoked.

        The server's own certificate does not show here; a server that cannot renew is missed by its heartbeats.
        """
        return self._add(Opened(self, identity, close, is_server=False))

    def forget(self, opened: Opened) -> None:
        of_identity = self._opened.get(opened.identity.id, {})
        of_identity.pop(opened, None)
        if not of_identity:
            self._opened.pop(opened.identity.id, None)

    @property
    def num_open(self) -> int:
        return sum(map(len, self._opened.values()))

    def sweep(self) -> None:
        """Close what expired identities have open, and forget the expiry of those that have nothing open."""
        now, date = self._elapsed(), self._clock()
        for id, seen in list(self._seen.items()):
            is_valid = any(each.valid_until > now for each in seen.values())
            # One that has expired is remembered while the date would make it valid again.
            self._seen[id] = kept = {serial: each for serial, each in seen.items() if each.is_needed(now, date)}
            if not kept:
                del self._seen[id]
            if is_valid:
                continue
            for opened in [opened for opened in self._opened.get(id, ()) if opened.is_server]:
                self._close(opened, _expired(opened.identity))

    async def run(self) -> None:
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    def _add(self, opened: Opened) -> Opened:
        self._opened.setdefault(opened.identity.id, {})[opened] = None
        return opened

    def _deny(self, ids: frozenset[str]) -> None:
        for id in ids:
            for opened in list(self._opened.get(id, ())):
                self._close(opened, _revoked(opened.identity))

    def _close(self, opened: Opened, reason: TandemError) -> None:
        """Close one, and go on with the others whatever happens: the list of the rest is being closed too."""
        self.forget(opened)
        try:
            opened.close(reason)
        except Exception:
            log.exception("peer_close_failed", peer=str(opened.identity))
        else:
            log.info("peer_closed", peer=str(opened.identity), reason=reason.message)


def _revoked(identity: Identity) -> PeerUnauthenticated:
    return PeerUnauthenticated(f"{identity} is revoked; enrol the process again with a new token")


def _expired(identity: Identity) -> PeerUnauthenticated:
    return PeerUnauthenticated(f"the certificate of {identity} has expired; it renews itself once it reaches a gateway")
