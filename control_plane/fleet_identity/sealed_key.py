"""Encrypts an authority's private key for the database, under a key derived from the control plane's secret.

A sealed key is 12 random bytes and the AES-256-GCM of the key (PKCS #8, DER). The certificate is authenticated with it,
so a sealed key opens only in the row that it was written to.
"""

from __future__ import annotations

import os

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from control_plane.fleet_identity.certificates import PrivateKey
from tandem_runtime.errors import InvalidRequest

_NONCE_BYTES = 12
_PURPOSE = b"tandem certificate authority key 1"


def seal(key: PrivateKey, certificate: x509.Certificate, secret: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _cipher(secret).encrypt(nonce, private_bytes(key), _context(certificate))


def unseal(sealed: bytes, certificate: x509.Certificate, secret: bytes) -> PrivateKey:
    """Return the key. Raise InvalidRequest for another secret, or a row that was changed."""
    try:
        plain = _cipher(secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _context(certificate))
    except InvalidTag as error:
        raise InvalidRequest(
            "the secret of this control plane does not open the key of the fleet's certificate authority in the "
            "database; give all gateways of a database one secret (--secret, or the file `secret` of the state "
            "directory), or restore the authority with `tandem fleet restore`"
        ) from error
    return loaded(plain)


def private_bytes(key: PrivateKey) -> bytes:
    """Return a private key in PKCS #8, DER, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def loaded(plain: bytes) -> PrivateKey:
    key = serialization.load_der_private_key(plain, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "only P-256 keys are sealed"
    return key


def _cipher(secret: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret))


def _context(certificate: x509.Certificate) -> bytes:
    return certificate.fingerprint(hashes.SHA256())
