"""Copies slabs into the pool between two steps, within the copy budget: a large one in several turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, ImportSlab, SlabImported
from tandem_engine.scheduling.copy_budget import CopyBudget, pieces
from tandem_engine.scheduling.hand_over import ImportRefused, conversion_targets, import_targets, mark_imported
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request

log = logging.getLogger(__name__)


class PoolMemory(Protocol):
    """The bytes of the pool's blocks."""

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        """Copy each extent into the block beside it and return the bytes copied; raises RegionError, CorruptBlock."""
        ...

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        """Fill the parts beside each extent, a block of `layout`, and return the bytes read; raises the same."""
        ...


class _Import:
    """A slab on its way into the pool; `copy` copies a range of its extents and returns the bytes."""

    def __init__(self, extents: Sequence[ExtentRef], copy: Callable[[slice], int]) -> None:
        self.num_blocks = len(extents)
        self.copy = copy
        self.pieces: Iterator[slice] = pieces(extents)
        self.num_bytes = 0


class SlabImporter:
    """Imports one slab at a time, for the requests of one scheduler."""

    def __init__(
        self, requests: Mapping[str, Request], memory: PoolMemory, ledger: Ledger, budget: CopyBudget, block_size: int
    ) -> None:
        """`requests` are those that the scheduler has now, by id."""
        self._requests = requests
        self._memory = memory
        self._ledger = ledger
        self._budget = budget
        self._block_size = block_size
        self._import: _Import | None = None

    def import_some(self, command: ImportSlab) -> SlabImported | None:
        """Copy blocks of a slab within the copy budget; None: some are left, call again with the same command."""
        if not self._budget.has_left:
            return None
        try:
            slab, self._import = self._import or self._begin(command), None
            if not self._copy(slab):
                self._import = slab
                return None
        except (ImportRefused, RegionError) as error:
            if isinstance(error, CorruptBlock):
                log.error("a slab is corrupt: %s", error)
                self._ledger.count("blocks_corrupt")
            return SlabImported(command.request_id, command.slab_index, 0, str(error))
        mark_imported(self._requests[command.request_id], command, self._block_size)
        self._ledger.count("blocks_imported", slab.num_blocks)
        self._ledger.count("bytes_imported", slab.num_bytes)
        return SlabImported(command.request_id, command.slab_index, slab.num_bytes)

    def _begin(self, command: ImportSlab) -> _Import:
        request, layout, memory = self._requests.get(command.request_id), command.layout, self._memory
        if layout is not None:
            parts, extents = conversion_targets(request, command, layout.tokens_per_block, self._block_size)
            return _Import(extents, lambda piece: memory.convert_blocks(parts[piece], extents[piece], layout))
        blocks, extents = import_targets(request, command, self._block_size)
        return _Import(extents, lambda piece: memory.import_blocks(blocks[piece], extents[piece]))

    def _copy(self, slab: _Import) -> bool:
        """Return whether all of it is copied."""
        while self._budget.has_left:
            if (piece := next(slab.pieces, None)) is None:
                return True
            slab.num_bytes += self._budget.timed(partial(slab.copy, piece))
        return False
