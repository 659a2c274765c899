"""The text of a join token: what a machine needs to join a fleet, and to be sure that it is that fleet.

    tdj1.<id>.<secret>.<authority>[+<authority>].<host:port>[,<host:port>]

`authority` is the SHA-256 of the public key of one of the fleet's certificate authorities (SubjectPublicKeyInfo), in
base64 for URLs, as `secret` is. A process that joins compares it before it sends the secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field

from tandem_runtime.errors import InvalidRequest

PREFIX = "tdj1"
SECRET_BYTES = 32
MAX_ADDRESSES = 8
_MAX_CHARACTERS = 4096
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True)
class JoinToken:
    """A join token, read from its text."""

    id: str
    secret: bytes = field(repr=False)
    authorities: tuple[bytes, ...]
    addresses: tuple[str, ...]

    @property
    def text(self) -> str:
        pins = "+".join(map(encoded, self.authorities))
        return f"{PREFIX}.{self.id}.{encoded(self.secret)}.{pins}.{','.join(self.addresses)}"

    @property
    def credential(self) -> str:
        """What is sent to a gateway."""
        return f"{self.id}.{encoded(self.secret)}"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Raise InvalidRequest, which quotes nothing of the text, for any other form than `text` has."""
        parts = text.strip().split(".", 4)
        if len(text) > _MAX_CHARACTERS or len(parts) != 5 or parts[0] != PREFIX:
            raise _malformed("its form is tdj1.ID.SECRET.AUTHORITY.ADDRESSES")
        _, token_id, secret, pins, addresses = parts
        if not _ID.fullmatch(token_id):
            raise _malformed("its id is not 16 hex digits")
        authorities = tuple(decoded(pin) for pin in pins.split("+", 2))
        if len(authorities) > 2:
            raise _malformed("it names more than 2 authorities")
        return cls(token_id, decoded(secret), authorities, checked_addresses(addresses.split(",")))


def checked_addresses(addresses: list[str]) -> tuple[str, ...]:
    """Return addresses of enrolment ports; raise InvalidRequest for what is none, or for none."""
    wrong = [address for address in addresses if not _ADDRESS.fullmatch(address) or _port(address) > 65535]
    if wrong or not 0 < len(addresses) <= MAX_ADDRESSES:
        raise InvalidRequest(
            f"a join token has {len(addresses)} addresses, {len(wrong)} of them malformed; give 1 to {MAX_ADDRESSES} "
            "enrolment ports of the form HOST:PORT (--address)",
            field="token",
        )
    return tuple(addresses)


def encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def decoded(text: str) -> bytes:
    """Return 32 bytes; raise InvalidRequest for other texts than `encoded` makes of them."""
    try:
        value = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise _malformed("a part of it is not base64") from error
    if len(value) != SECRET_BYTES or encoded(value) != text:
        raise _malformed(f"a part of it does not have {SECRET_BYTES} bytes")
    return value


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the join token is malformed: {reason}; copy the whole line that `tandem fleet token` printed", field="token"
    )
