"""The MACs of KV handles of release 0.2: HMAC-SHA256 over the fields, cut to 16 bytes (RFC 2104, section 5).

Since then handles are signed (signatures.py). The MACs are for the upgrade of a fleet, until `--hmac-handles-until`.
"""

from __future__ import annotations

import hashlib
import hmac

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unauthenticated

MAC_BYTES = 16


def sign_handle(handle: pb.KvHandle, key: bytes) -> pb.KvHandle:
    """Return a copy of `handle` with its MAC, which covers a signature too."""
    signed = pb.KvHandle()
    signed.CopyFrom(handle)
    signed.mac = _mac(handle, key)
    return signed


def verify_handle(handle: pb.KvHandle, key: bytes) -> None:
    """Raise Unauthenticated unless `handle` carries the MAC of its fields under `key`."""
    if not hmac.compare_digest(_mac(handle, key), handle.mac):
        raise Unauthenticated(
            f"the KV handle of request {handle.request_id!r} has a wrong MAC: "
            "do all control-plane replicas and KV services share one handle key?",
            field="mac",
        )


def _mac(handle: pb.KvHandle, key: bytes) -> bytes:
    unsigned = pb.KvHandle()
    unsigned.CopyFrom(handle)
    unsigned.ClearField("mac")
    return hmac.digest(key, unsigned.SerializeToString(deterministic=True), hashlib.sha256().name)[:MAC_BYTES]
