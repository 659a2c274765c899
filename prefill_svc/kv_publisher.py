"""How does one prompt's KV cache become visible, slab by slab?"""

from __future__ import annotations

import asyncio

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.seal_stream import SealLine, seal_request


class Sealer:
    """Turns one request's SealedBlocks and first tokens into Reserve and Seal calls, in order.

    Blocks that complete while a call is under way are gathered into the next one.
    """

    def __init__(self, handle: pb.KvHandle, layout: pb.KvLayout, region_id: str, num_choices: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.num_slabs = 0
        self._handle = handle
        self._layout = layout
        self._region_id = region_id
        self._num_choices = num_choices
        self._slabs: list[kv.Slab] = []
        self._num_blocks = 0
        self._has_all_blocks = False
        self._first_tokens: dict[int, kv.FirstToken] = {}
        self._changed = asyncio.Event()

    def blocks(self, sealed: messages.SealedBlocks) -> None:
        """Take a run of completed blocks; the last one may only say that there are no more."""
        if sealed.slots:
            self._slabs.append(self._slab(sealed))
        self._num_blocks = max(self._num_blocks, sealed.first_block + len(sealed.slots))
        self._has_all_blocks = self._has_all_blocks or sealed.is_last
        self._changed.set()

    def first_token(self, output: pb.TokenOutput) -> None:
        token = kv.FirstToken(token_id=output.token_ids[0], finish_reason=output.finish_reason)
        if output.logprobs:
            token.logprobs.CopyFrom(output.logprobs[0])
        self._first_tokens[output.choice_index] = token
        self._changed.set()

    async def run(self, client: KvClient) -> None:
        """Reserve the handle, then seal until everything is visible; raises TandemError if the KV service refuses."""
        await client.reserve(self._handle, self._region_id, self._layout)
        line = client.seal_line()
        try:
            while not await self._seal_next(line):
                pass
        finally:
            line.close()

    async def _seal_next(self, line: SealLine) -> bool:
        """Seal what has come since the last call; return whether that was the last of it."""
        await self._changed.wait()
        self._changed.clear()
        slabs, self._slabs = self._slabs, []
        is_complete = self._has_all_blocks and len(self._first_tokens) == self._num_choices
        if not slabs and not is_complete:
            return False
        await line.seal(seal_request(self._handle, slabs, self._closed() if is_complete else None))
        return is_complete

    def _closed(self) -> kv.Closed:
        first_tokens = [self._first_tokens[index] for index in range(self._num_choices)]
        return kv.Closed(num_slabs=self.num_slabs, num_blocks=self._num_blocks, first_tokens=first_tokens)

    def _slab(self, sealed: messages.SealedBlocks) -> kv.Slab:
        group = self._layout.groups[sealed.group]
        size = group.bytes_per_block
        slab = kv.Slab(
            index=self.num_slabs,
            group=sealed.group,
            first_block=sealed.first_block,
            num_blocks=len(sealed.slots),
            first_layer=group.layers[0],
            num_layers=len(group.layers),
            extents=[
                pb.Extent(
                    kind=pb.MEMORY_KIND_HOST,
                    region_id=self._region_id,
                    offset=slot * size,
                    num_bytes=size,
                    slot=slot,
                    generation=generation,
                )
                for slot, generation in zip(sealed.slots, sealed.generations, strict=True)
            ],
            checksums=sealed.checksums,
        )
        self.num_slabs += 1
        return slab
