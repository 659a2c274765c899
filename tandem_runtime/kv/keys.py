"""The keys that a process gets from the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.v1 import control_plane_pb2 as cp

MAX_PUBLIC_KEYS = 8
"""Of one gateway: its own, and for a rotation some more."""


@dataclass(frozen=True)
class KvKeys:
    """Keys for handles and links. Public keys are for everybody; the others are for KV services only."""

    public_keys: tuple[bytes, ...] = ()
    """Ed25519 keys, 32 bytes each, that verify the signatures of handles."""
    link_key: bytes = field(default=b"", repr=False)
    """Signs and verifies the requests by which KV services open links."""
    mac_key: bytes = field(default=b"", repr=False)
    """Makes and verifies the MACs of release 0.2, on handles and on links."""

    @classmethod
    def of(cls, reply: cp.RegisterReply) -> KvKeys:
        return cls(tuple(reply.handle_public_keys[:MAX_PUBLIC_KEYS]), reply.link_key, reply.handle_key)
