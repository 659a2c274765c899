"""How does a gateway on another host get the tokenizer?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvNotFound

CHUNK_BYTES = 1 << 20


class AssetStore:
    """The checkpoint's files that gateways may fetch, by digest."""

    def __init__(self) -> None:
        self._paths: dict[bytes, Path] = {}

    def offer(self, card: pb.ModelCard, paths: Mapping[str, str]) -> None:
        self._paths = {asset.digest: Path(paths[asset.name]) for asset in card.assets}

    async def chunks(self, digest: bytes) -> AsyncIterator[pb.Chunk]:
        """Yield a file in chunks of 1 MiB; raises KvNotFound for a digest that was not offered."""
        path = self._paths.get(digest)
        if path is None:
            raise KvNotFound(f"no asset {digest.hex()} here; the worker may have been restarted on another model")
        content = await asyncio.to_thread(path.read_bytes)
        for offset in range(0, len(content), CHUNK_BYTES):
            yield pb.Chunk(offset=offset, data=content[offset : offset + CHUNK_BYTES])
