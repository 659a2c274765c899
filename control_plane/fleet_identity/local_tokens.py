"""The join tokens for processes of this machine, in a folder that the gateways of the machine share.

    join/prefill, decode, encode, kv    one token each, with the enrolment ports of the gateways
    join/addresses                      the same gateways' addresses for other machines

Each gateway takes the tokens of all others, since they share a database. So a token names every gateway of the machine:
whichever has ended, a process joins at another.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from control_plane.fleet_identity.addresses import ADDRESSES, known_addresses
from tandem_runtime.certificates.names import Role
from tandem_runtime.enrolment.join_token import MAX_ADDRESSES, JoinToken
from tandem_runtime.errors import InvalidRequest

_LOCK = ".lock"


class LocalTokens:
    """One gateway's part in the folder. The methods read and write files: call them in a thread."""

    def __init__(self, folder: Path, local_address: str, advertised: Sequence[str]) -> None:
        """`local_address`: where processes of this machine reach the gateway; `advertised`: where others do."""
        self._folder = folder
        self._local = (local_address,)
        self._advertised = tuple(advertised)
        self._tokens: Mapping[Role, JoinToken] = {}
        """What this gateway wrote last."""

    def write(self, tokens: Mapping[Role, JoinToken]) -> None:
        """Replace the tokens. Their first writing by this gateway keeps the addresses of the fleet's other gateways.

        Later ones do not: a gateway that is there adds its own again, and those that are gone are forgotten.
        """
        with self._locked():
            is_first, self._tokens = not self._tokens, tokens
            has_others = is_first and any(self._of_our_fleet(role) is not None for role in tokens)
            for role, token in tokens.items():
                found = self._of_our_fleet(role) if is_first else None
                self._put(role, token, found.addresses if found is not None else ())
            self._put_advertised(self._known_addresses() if has_others else ())

    def add_ours(self) -> None:
        """Add this gateway's addresses where another gateway of the fleet has written tokens without them."""
        with self._locked():
            found = {role: self._of_our_fleet(role) for role in self._tokens}
            for role, token in found.items():
                if token is not None and not set(self._local) <= set(token.addresses):
                    self._put(role, token, token.addresses)
            addresses = self._known_addresses()
            if any(found.values()) and not set(self._advertised) <= set(addresses):
                self._put_advertised(addresses)

    def _put(self, role: Role, token: JoinToken, others: Sequence[str]) -> None:
        _write_private(self._folder / role, replace(token, addresses=_joined(self._local, others)).text)

    def _put_advertised(self, others: Sequence[str]) -> None:
        _write_private(self._folder / ADDRESSES, "\n".join(_joined(self._advertised, others)))

    def _known_addresses(self) -> Sequence[str]:
        try:
            return known_addresses(self._folder)
        except InvalidRequest:  # unreadable: it is replaced
            return ()

    def _of_our_fleet(self, role: Role) -> JoinToken | None:
        """Return the token in the folder; None if there is none, or another fleet's, which is left to its gateway."""
        try:
            token = JoinToken.parse((self._folder / role).read_text())
        except (FileNotFoundError, UnicodeDecodeError, InvalidRequest):
            return None
        return None if set(token.authorities).isdisjoint(self._tokens[role].authorities) else token

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other gateways out, so that none loses what another adds."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _joined(ours: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ours, *others)))[:MAX_ADDRESSES]


def _write_private(path: Path, text: str) -> None:
    """Replace a file by one of mode 0600."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    draft.replace(path)
