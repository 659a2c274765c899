"""Signs KV handles with Ed25519 (RFC 8032), and verifies them with public keys only.

    KvHandle.signature   | version 1 | key id: 8 bytes | Ed25519 signature: 64 bytes |
    signed bytes         | "tandem kv handle" 0 | version 1 | key id | each field: length (4 bytes), content |

The fields come in the order of their numbers; integers have 8 bytes, all little-endian. The form does not depend on how
protobuf writes a message. It says what the handle permits: the prefill worker `prefill_incarnation` fills it at the
holder, once and for one attempt of one request; `num_readers` readers may read it; all of it ends at the deadline.

A signature is verified once per handle: the verifier keeps digests of what it has accepted.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.mac import sign_handle, verify_handle

VERSION = 1
SIGNATURE_BYTES = 1 + 8 + 64
MAX_SIGNED_BYTES = 8192
"""Of the fields of a handle: a handle of ours has 300 to 600."""
MAX_VERIFIED = 65_536
"""Digests of accepted handles that are kept: 10 MB, as many as a KV service has handles by default."""

_DOMAIN = b"tandem kv handle\0"
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


class HandleSigner:
    """The gateways' side. All gateways with one `secret` have one signer, so a restart changes no key."""

    def __init__(
        self, seed: bytes, mac_key: bytes = b"", macs_until: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        """`seed` has 32 bytes. Until `macs_until` (`clock`'s seconds), handles carry a MAC under `mac_key` as well."""
        self._private_key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._private_key.public_key().public_bytes_raw()
        self._key_id = key_id(self.public_key)
        self._mac_key = mac_key
        self._macs_until = macs_until
        self._clock = clock

    def sign(self, handle: pb.KvHandle) -> pb.KvHandle:
        """Return a signed copy of `handle`; only the control plane mints handles."""
        signed = pb.KvHandle()
        signed.CopyFrom(handle)
        signed.ClearField("mac")
        content = signed_bytes(handle, self._key_id)
        signed.signature = bytes([VERSION]) + self._key_id + self._private_key.sign(content)
        if self._mac_key and self._clock() < self._macs_until:
            # Last: a service of release 0.2 computes the MAC over all fields, those that it does not know included.
            signed = sign_handle(signed, self._mac_key)
        return signed


class HandleVerifier:
    """The KV services' side. Used on one event loop."""

    def __init__(
        self, keys: Callable[[], KvKeys], macs_until: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        """`keys` returns the current keys. Until `macs_until` (`clock`'s seconds), a MAC of release 0.2 is enough."""
        self._keys = keys
        self._macs_until = macs_until
        self._clock = clock
        self._raw_keys: tuple[bytes, ...] = ()
        self._public_keys: dict[bytes, Ed25519PublicKey] = {}
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_verified(self) -> int:
        """Accepted handles that are known without another verification."""
        return len(self._verified)

    def verify(self, handle: pb.KvHandle) -> None:
        """Raise Unauthenticated unless a gateway of this fleet signed every field of `handle`."""
        keys = self._keys()
        if keys.public_keys != self._raw_keys:
            self._take(keys.public_keys)
        if not self._public_keys and not keys.mac_key:
            raise Unavailable("this KV service has not registered with a control plane yet: it cannot verify handles")
        public_key = self._public_keys.get(handle.signature[1:9])
        if public_key is not None:
            self._verify_signature(handle, public_key)
        elif keys.mac_key and self._clock() < self._macs_until:
            verify_handle(handle, keys.mac_key)
        elif handle.signature:
            raise _refused(
                handle,
                f"is signed with key {handle.signature[1:9].hex()}, known here: "
                f"{', '.join(each.hex() for each in self._public_keys) or 'none'}; give all gateways one secret, and "
                "let this KV service register with each of them",
            )
        else:
            raise _refused(
                handle, "has no signature; if its gateway is of release 0.2, set --hmac-handles-until here for a while"
            )

    def _take(self, raw_keys: tuple[bytes, ...]) -> None:
        """Use other keys. What the earlier ones verified is verified again."""
        self._raw_keys = raw_keys
        self._public_keys = {key_id(raw): Ed25519PublicKey.from_public_bytes(raw) for raw in raw_keys if len(raw) == 32}
        self._verified.clear()

    def _verify_signature(self, handle: pb.KvHandle, public_key: Ed25519PublicKey) -> None:
        signature = handle.signature
        if len(signature) != SIGNATURE_BYTES or signature[0] != VERSION:
            raise _refused(
                handle,
                f"has a signature of version {signature[0]} and {len(signature)} bytes; "
                f"this release knows version {VERSION} of {SIGNATURE_BYTES} bytes",
            )
        content = signed_bytes(handle, signature[1:9])
        digest = hashlib.blake2b(content + signature, digest_size=32).digest()
        if digest in self._verified:
            return
        try:
            public_key.verify(signature[9:], content)
        except InvalidSignature:
            raise _refused(handle, "has a wrong signature: no gateway of this fleet made it as it is") from None
        self._verified[digest] = None
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)


def key_id(public_key: bytes) -> bytes:
    """Return the 8 bytes by which a handle names the key that verifies it."""
    return hashlib.sha256(b"tandem kv handle key\0" + public_key).digest()[:8]


def signed_bytes(handle: pb.KvHandle, key: bytes) -> bytes:
    """Return the canonical bytes of a handle; raises Unauthenticated if they are more than any handle of ours."""
    fields = (
        handle.handle_id,
        handle.request_id.encode(),
        _NUMBER.pack(handle.attempt),
        handle.prefill_incarnation.encode(),
        handle.holder_address.encode(),
        handle.holder_incarnation.encode(),
        handle.model.model_id.encode(),
        handle.model.fingerprint,
        handle.layout_digest,
        _NUMBER.pack(handle.num_tokens),
        _NUMBER.pack(handle.num_readers),
        _NUMBER.pack(handle.deadline_unix_ms & (2**64 - 1)),
        handle.holder_id.encode(),
    )
    num_bytes = sum(map(len, fields))
    if num_bytes > MAX_SIGNED_BYTES:
        raise Unauthenticated(
            f"a KV handle has {num_bytes} bytes of fields, at most {MAX_SIGNED_BYTES} are read", field="handle"
        )
    parts = [_DOMAIN, bytes([VERSION]), key]
    for content in fields:
        parts += (_LENGTH.pack(len(content)), content)
    return b"".join(parts)


def _refused(handle: pb.KvHandle, what: str) -> Unauthenticated:
    return Unauthenticated(f"the KV handle of request {handle.request_id[:256]!r} {what}", field="signature")
