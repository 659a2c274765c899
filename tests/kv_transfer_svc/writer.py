"""A prefill worker for tests: a real region of random blocks, lent to its host's KV service."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.identity import new_incarnation
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv.shared_region import SharedRegion
from tests.kv_transfer_svc.layout import BLOCK_BYTES, BLOCK_TOKENS, SIGNER, a_layout


class Writer:
    """A prefill worker: a region of random blocks, lent to its host's KV service."""

    def __init__(
        self,
        socket: str,
        address: str,
        holder_incarnation: str,
        *,
        num_slots: int = 16,
        lease_seconds: float = 10.0,
        member: FleetMember | None = None,
    ) -> None:
        self.holder_incarnation = holder_incarnation
        self.holder_id = ""
        self.incarnation = new_incarnation()
        self.region_id = f"region-{self.incarnation}"
        self.region = SharedRegion.create("test-pool", num_slots * BLOCK_BYTES, num_slots)
        self.region.view(0, num_slots * BLOCK_BYTES)[:] = secrets.token_bytes(num_slots * BLOCK_BYTES)
        self.regions = RegionClient(socket)
        self.client = KvClient(address, self.incarnation, lease_seconds=lease_seconds, member=member)

    async def lend(self) -> None:
        region = self.region
        await self.regions.offer(
            self.region_id,
            self.incarnation,
            region.total_bytes,
            region.num_slots,
            BLOCK_BYTES,
            region.generations_offset,
            region.fd,
        )

    def block(self, slot: int) -> bytes:
        return bytes(self.region.view(slot * BLOCK_BYTES, BLOCK_BYTES))

    def slab(self, index: int, first_block: int, slots: Sequence[int], **changes: Any) -> kv.Slab:
        extents = [
            pb.Extent(
                kind=pb.MEMORY_KIND_HOST,
                region_id=self.region_id,
                offset=slot * BLOCK_BYTES,
                num_bytes=BLOCK_BYTES,
                slot=slot,
                generation=self.region.generation(slot),
            )
            for slot in slots
        ]
        slab = kv.Slab(index=index, first_block=first_block, num_blocks=len(slots), num_layers=2, extents=extents)
        for name, value in changes.items():
            setattr(slab, name, value)
        return slab

    def handle(self, num_blocks: int = 4, num_readers: int = 1, seconds: float = 60.0) -> pb.KvHandle:
        """Return a handle as the control plane mints it for this worker."""
        handle = pb.KvHandle(
            handle_id=secrets.token_bytes(16),
            request_id=f"request-{secrets.token_hex(3)}",
            attempt=1,
            prefill_incarnation=self.incarnation,
            holder_address=self.client.address,
            holder_incarnation=self.holder_incarnation,
            holder_id=self.holder_id,
            layout_digest=layout_digest(a_layout()),
            num_tokens=num_blocks * BLOCK_TOKENS,
            num_readers=num_readers,
            deadline_unix_ms=int((time.time() + seconds) * 1000),
        )
        return SIGNER.sign(handle)

    async def die(self) -> None:
        """Close the socket without any other message, as a killed worker does."""
        await self.regions.close()

    async def close(self) -> None:
        await self.regions.close()
        await self.client.close()
        self.region.close()
