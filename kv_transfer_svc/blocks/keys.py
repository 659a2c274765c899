"""By what name is a KV block found again?"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.layout import DIGEST_BYTES

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A block's content: tokens (and all before them) by their hash, laid out as `layout_digest` says, of one group.

    The content of one key never changes. Raises InvalidRequest for hashes of another length.
    """

    layout_digest: bytes
    group: int
    block_hash: bytes

    def __post_init__(self) -> None:
        if len(self.layout_digest) != DIGEST_BYTES:
            raise InvalidRequest(
                f"a layout digest has {DIGEST_BYTES} bytes, not {len(self.layout_digest)}", field="layout_digest"
            )
        if len(self.block_hash) != HASH_BYTES:
            raise InvalidRequest(f"a block hash has {HASH_BYTES} bytes, not {len(self.block_hash)}", field="block_hash")

    def __hash__(self) -> int:
        # The block hash is spread evenly and nearly unique alone, and bytes keep their hash once computed.
        return hash(self.block_hash)

    def __str__(self) -> str:
        return f"block {self.block_hash.hex()} of group {self.group}, layout {self.layout_digest.hex()[:8]}"
