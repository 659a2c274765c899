"""What the key of a certificate signs to renew it."""

from __future__ import annotations

import hashlib

_PURPOSE = b"tandem renew certificate 1\0"


def renewal_proof(certificate_request: bytes) -> bytes:
    """Return the bytes to sign: who repeats them gets a certificate for the same new key, which only its owner has."""
    return _PURPOSE + hashlib.sha256(certificate_request).digest()
