"""Which blocks of a prompt can others have already, and which have come from others?"""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import ExtentRef, ImportSlab, SealedBlocks
from engine.scheduling.request import Request, RequestState


class ImportRefused(Exception):
    """A slab is for a request that does not wait for it; nothing was copied."""


def seal(request: Request, num_written_tokens: int, generations: Sequence[int], block_size: int) -> SealedBlocks | None:
    """Tell of a prefill's blocks that are complete since the last call: found ones too, and with its end the tail."""
    is_last = num_written_tokens == request.num_tokens
    first, table = request.num_sealed_blocks, request.block_table
    end = len(table) if is_last else num_written_tokens // block_size
    if end <= first or request.is_release_due:  # less than before: a step broke behind its seal, and runs again
        return None
    request.num_sealed_blocks = end
    slots = table[first:end]
    return SealedBlocks(request.request_id, first, slots, [generations[slot] for slot in slots], is_last)


def import_targets(request: Request | None, command: ImportSlab, block_size: int) -> tuple[list[int], list[ExtentRef]]:
    """Return the blocks to write and where from, without those that are here already.

    Raises ImportRefused if the request does not wait for them.
    """
    if request is None or request.state is not RequestState.IMPORTING:
        raise ImportRefused(f"request {command.request_id} does not wait for blocks")
    end, num_blocks = command.first_block + len(command.extents), -(-request.num_given_tokens // block_size)
    if not 0 <= command.first_block <= end <= num_blocks:
        raise ImportRefused(f"slab has blocks {command.first_block} to {end}, the prompt has {num_blocks}")
    missing = [
        (request.block_table[index], extent)
        for index, extent in enumerate(command.extents, command.first_block)
        if index >= request.num_found_blocks and index not in request.imported_blocks
    ]
    return [block for block, _ in missing], [extent for _, extent in missing]


def num_ready_tokens(request: Request, block_size: int) -> int:
    """Count the leading tokens of a decode request whose KV was found here or has come."""
    index = request.num_found_blocks
    while index in request.imported_blocks:
        index += 1
    return min(index * block_size, request.num_given_tokens)
