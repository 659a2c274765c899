"""Computes which blocks of a prompt other processes can read now, and which arrived from others."""

from __future__ import annotations

from tandem_engine.messages import ExtentRef, ImportSlab, SealedBlocks
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.request import Request, RequestState


class ImportRefused(Exception):
    """The request does not wait for this slab; nothing was copied."""


def seal(request: Request, num_written_tokens: int, kv: KVCacheManager) -> list[SealedBlocks]:
    """Return a prefill's blocks that became complete since the last call, cached ones too; at its end also the tail.

    Of groups with a window, only the blocks that the answer attends to. The last entry has `is_last` set.
    """
    is_last = num_written_tokens == request.num_tokens
    first, generations = request.num_sealed_blocks, kv.pool.generations
    end = len(request.block_table) if is_last else num_written_tokens // kv.pool.block_size
    if end <= first or request.is_release_due:  # fewer than before: a step failed after its seal and runs again
        return []
    request.num_sealed_blocks = end
    sealed = []
    for group, table in reversed(list(enumerate(request.tables))):
        start = max(first, kv.groups.first_seen(request.num_tokens)) if group else first
        if slots := table[start:end]:
            stamps = [generations[slot] for slot in slots]
            sealed.append(SealedBlocks(request.request_id, start, slots, stamps, is_last and not group, group=group))
    return sealed


def import_targets(request: Request | None, command: ImportSlab, block_size: int) -> tuple[list[int], list[ExtentRef]]:
    """Return the blocks to write and their sources, without blocks that are here already.

    Raises ImportRefused if the request does not wait for them.
    """
    if request is None or request.state is not RequestState.IMPORTING:
        raise ImportRefused(f"request {command.request_id} does not wait for blocks")
    if not 0 <= command.group < len(request.tables):
        raise ImportRefused(f"slab is of group {command.group}, this model has {len(request.tables)}")
    end, num_blocks = command.first_block + len(command.extents), -(-request.num_initial_tokens // block_size)
    if not 0 <= command.first_block <= end <= num_blocks:
        raise ImportRefused(f"slab has blocks {command.first_block} to {end}, the prompt has {num_blocks}")
    group, table = command.group, request.tables[command.group]
    first = max(request.num_found_blocks, request.num_dropped_blocks) if group else request.num_found_blocks
    missing = [
        (table[index], extent)
        for index, extent in enumerate(command.extents, command.first_block)
        if index >= first and (group, index) not in request.imported_blocks
    ]
    return [block for block, _ in missing], [extent for _, extent in missing]


def num_ready_tokens(request: Request, block_size: int) -> int:
    """Count the leading tokens of a decode request whose KV was found here or has arrived.

    Groups with a window get only the end of the prompt, so that end is usable as a whole or not at all.
    """
    first, imported = request.num_found_blocks, request.imported_blocks
    index = first
    while (0, index) in imported:
        index += 1
    num_blocks = -(-request.num_initial_tokens // block_size)
    needed = range(max(first, request.num_dropped_blocks), num_blocks)
    groups = range(1, len(request.tables))
    if groups and (index < num_blocks or any((group, place) not in imported for group in groups for place in needed)):
        index = first
    return min(index * block_size, request.num_initial_tokens)
