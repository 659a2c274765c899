"""Fetches the files of models from workers, by digest, and reads what a worker may have written in them.

Whatever a file has in it, the worst outcome is an error of its model. A file is bounded while it comes. The gateway's
own process parses only the special tokens of a tokenizer_config.json; text processes parse the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from typing import Any

import msgspec

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import TandemError, Unavailable

_FETCH_SECONDS = 20.0
_MAX_FETCHES = 4
"""At a time: so many files of the greatest size are the most that this process holds of what is not checked yet."""
MAX_ASSET_BYTES = 256 << 20
"""Of a tokenizer.json; the largest of today's models are 34 MB."""
MAX_CONFIG_BYTES = 16 << 20
"""Of a tokenizer_config.json; the largest of today's models are 2 MB. It is parsed on the event loop, in some 20 ms."""
_REMEDY = "put the model's own file in its folder and restart its workers"

_Config = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BrokenFile(Unavailable):
    """A worker's file cannot be used, whoever sends it: only another file can."""


class TooLarge(BrokenFile):
    """Every worker that has offered the file so far sends too much. Another worker may have the file itself."""


class ModelFiles:
    """The tokenizer.json files of models that are described, by digest."""

    def __init__(self, registry: WorkerRegistry, member: FleetMember | None) -> None:
        self._registry = registry
        self._member = member
        self._kept: dict[bytes, bytes] = {}
        self._fetching: dict[bytes, asyncio.Task[bytes]] = {}
        self._slots = asyncio.Semaphore(_MAX_FETCHES)

    async def tokenizer_json(self, asset: pb.Asset) -> bytes:
        """Return a file's bytes from any worker that has the file. Raise Unavailable."""
        digest = asset.digest
        if digest in self._kept:
            return self._kept[digest]
        fetching = self._fetching.get(digest)
        if fetching is None:
            fetching = asyncio.create_task(self._fetch_from_any(asset, MAX_ASSET_BYTES), name="fetch-tokenizer")
            self._fetching[digest] = fetching
            fetching.add_done_callback(lambda _: self._fetching.pop(digest, None))
        return await asyncio.shield(fetching)  # several models may have the same file

    async def special_tokens(self, model_id: str, asset: pb.Asset) -> dict[str, Any]:
        """Return the special tokens of a tokenizer_config.json by name. Raise Unavailable, BrokenFile."""
        return special_tokens(model_id, await self._fetch_from_any(asset, MAX_CONFIG_BYTES))

    def keep(self, digest: bytes, content: bytes) -> None:
        """Keep a file that was fetched, for models that have the same."""
        self._kept[digest] = content

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Drop all other files."""
        self._kept = {digest: content for digest, content in self._kept.items() if digest in digests}

    async def _fetch_from_any(self, asset: pb.Asset, max_bytes: int) -> bytes:
        reason, errors = "no worker offers it", []
        for worker in self._registry.workers():
            if not any(other.digest == asset.digest for other in worker.info.card.assets):
                continue
            try:
                async with self._slots:
                    return await _fetch(worker, asset, self._member, max_bytes)
            except TandemError as error:
                reason = error.message
                errors.append(error)
        kind = TooLarge if errors and all(isinstance(error, TooLarge) for error in errors) else Unavailable
        raise kind(f"{asset.name} ({asset.digest.hex()}) could not be fetched: {reason}")


def special_tokens(model_id: str, content: bytes) -> dict[str, Any]:
    """Return the entries whose names end in `_token`. All other values are skipped, not built. Raise BrokenFile."""
    try:
        values = _Config.decode(content)
        return {name: msgspec.json.decode(value) for name, value in values.items() if name.endswith("_token")}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        what = "a JSON object" if isinstance(error, msgspec.ValidationError) else "JSON"
        raise BrokenFile(f"the tokenizer_config.json of {model_id} is not {what}: {error}; {_REMEDY}") from error


async def _fetch(worker: Worker, asset: pb.Asset, member: FleetMember | None, max_bytes: int) -> bytes:
    async with open_worker_channel(worker.info, member) as channel:
        is_encoder = worker.role == pb.WORKER_ROLE_ENCODE
        stub: Any = (worker_pb2_grpc.EncodeServiceStub if is_encoder else worker_pb2_grpc.WorkerServiceStub)(channel)
        request = pb.AssetRequest(digest=asset.digest)
        content = bytearray()
        async for chunk in stub.GetAsset(request, timeout=_FETCH_SECONDS):
            content += chunk.data
            if len(content) > max_bytes:
                raise TooLarge(
                    f"worker {worker.worker_id} sends more than {max_bytes:,} bytes as {asset.name}; "
                    "check the model's folder there"
                )
    digest = await asyncio.to_thread(lambda: hashlib.blake2b(content, digest_size=16).digest())
    if digest != asset.digest:
        raise Unavailable(f"worker {worker.worker_id} sent a {asset.name} that does not match its digest")
    return bytes(content)
