"""Computes which blocks of a prompt other processes can read now, and which arrived from others."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_engine.extents import BlockPart
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
    request = _awaiting(request, command, block_size)
    group, table = command.group, request.tables[command.group]
    first = _first_missing(request, group)
    missing = [
        (table[index], extent)
        for index, extent in enumerate(command.extents, command.first_block)
        if index >= first and (group, index) not in request.imported_blocks
    ]
    return [block for block, _ in missing], [extent for _, extent in missing]


def conversion_targets(
    request: Request | None, command: ImportSlab, size: int, block_size: int
) -> tuple[list[list[BlockPart]], list[ExtentRef]]:
    """Return the parts of our blocks to write, and beside each list its source, a block of `size` tokens.

    Leaves out tokens that are here already, and what a partly filled last block has behind the prompt. Raises
    ImportRefused if the request does not wait for the slab.
    """
    request = _awaiting(request, command, size)
    group, table = command.group, request.tables[command.group]
    first_token = _first_missing(request, group) * block_size
    parts, extents = [], []
    for index, extent in enumerate(command.extents, command.first_block):
        start, end = max(first_token, index * size), min((index + 1) * size, request.num_initial_tokens)
        if start < end and (group, index) not in request.imported_blocks:
            parts.append(_parts(table, start, end, index * size, block_size))
            extents.append(extent)
    return parts, extents


def mark_imported(request: Request, command: ImportSlab, block_size: int) -> None:
    """Note that all blocks of a slab are imported."""
    indices = range(command.first_block, command.first_block + len(command.extents))
    request.imported_blocks.update((command.group, index) for index in indices)
    request.imported_block_size = command.layout.tokens_per_block if command.layout else block_size


def num_ready_tokens(request: Request, block_size: int, window: int) -> int:
    """Count the leading tokens of a decode request whose KV was found here or has arrived.

    Groups with a `window` get only the end of the prompt, so that end is usable as a whole or not at all.
    """
    size, imported = request.imported_block_size or block_size, request.imported_blocks
    first, num_tokens = request.num_found_blocks * block_size, request.num_initial_tokens
    index = first // size
    while (0, index) in imported:
        index += 1
    end = min(index * size, num_tokens)
    needed = range(_first_needed(request, block_size, window) // size, -(-num_tokens // size))
    of_windows = ((group, place) for group in range(1, len(request.tables)) for place in needed)
    if request.window_tables and (end < num_tokens or any(block not in imported for block in of_windows)):
        return first
    return max(first, end)


def first_whole_block(request: Request, block_size: int, window: int) -> int:
    """Return the first block of groups with a window that has all its tokens, once all slabs have arrived.

    A writer with smaller blocks hands over less before the window than our first block there holds.
    """
    size = request.imported_block_size or block_size
    first_token = _first_needed(request, block_size, window) // size * size
    return -(-first_token // block_size)


def _awaiting(request: Request | None, command: ImportSlab, size: int) -> Request:
    """Return the request if it waits for the blocks of `size` tokens in a slab; raises ImportRefused."""
    if request is None or request.state is not RequestState.IMPORTING:
        raise ImportRefused(f"request {command.request_id} does not wait for blocks")
    if not 0 <= command.group < len(request.tables):
        raise ImportRefused(f"slab is of group {command.group}, this model has {len(request.tables)}")
    if request.imported_block_size not in (0, size):
        raise ImportRefused(f"slab has blocks of {size} tokens, those before had {request.imported_block_size}")
    end, num_blocks = command.first_block + len(command.extents), -(-request.num_initial_tokens // size)
    if not 0 <= command.first_block <= end <= num_blocks:
        raise ImportRefused(f"slab has blocks {command.first_block} to {end}, the prompt has {num_blocks}")
    return request


def _first_missing(request: Request, group: int) -> int:
    """Return the first of a group's blocks that is to be written."""
    return max(request.num_found_blocks, request.num_dropped_blocks) if group else request.num_found_blocks


def _first_needed(request: Request, block_size: int, window: int) -> int:
    """Return the first token that the token behind the prompt attends to in groups with a window, and is not here."""
    return max(_first_missing(request, 1) * block_size, request.num_initial_tokens - window + 1)


def _parts(table: Sequence[int], start: int, end: int, source_start: int, block_size: int) -> list[BlockPart]:
    """Cut tokens [start, end) of a block that begins with token `source_start` at the borders of our blocks."""
    parts = []
    while start < end:
        index, place = divmod(start, block_size)
        num_tokens = min(block_size - place, end - start)
        parts.append(BlockPart(table[index], place, start - source_start, num_tokens))
        start += num_tokens
    return parts
