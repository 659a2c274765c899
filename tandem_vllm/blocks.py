"""What Tandem does with blocks of vLLM's pool: the books, and the bytes. `VllmBlocks` and `BlockMemory` do it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.scheduling.block_hash import BlockHash


class Blocks(Protocol):
    """vLLM's block pool, by block number. Tandem holds references of its own beside those of vLLM's requests."""

    @property
    def generations(self) -> Sequence[int]:
        """One per block; grows whenever the block is allocated."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that `take`, or a request of vLLM, can get."""
        ...

    def find(self, keys: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix of a chain; `hold` them before the next allocation."""
        ...

    def take(self, num_blocks: int) -> list[int]:
        """Allocate blocks, and hold them; raises ValueError if `num_available` is less."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        ...

    def let_go(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a table."""
        ...

    def num_references(self, block: int) -> int:
        """Count the references of requests and of Tandem to a block."""
        ...

    def register(self, blocks: Sequence[int], keys: Sequence[BlockHash]) -> None:
        """Make full blocks findable by the keys beside them; nobody may write them again."""
        ...


class Memory(Protocol):
    """The bytes of the blocks: those of all layers, one layer after another."""

    def map_region(self, command: MapRegion, *fds: int) -> None:
        """Map another process's region; raises RegionError."""
        ...

    def unmap_region(self, region_id: str) -> None: ...

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        """Copy each extent into the block beside it and return the bytes; raises RegionError, CorruptBlock."""
        ...

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        """Fill the parts beside each extent, a block of `layout`, and return the bytes read; raises the same."""
        ...

    def read(self, block: int) -> Any:
        """Return a copy of a block's bytes."""
        ...

    def write(self, block: int, content: Any) -> None:
        """Overwrite a block with what `read` returned."""
        ...
