"""The memory that blocks of a private pool are copied to, for other processes.

On CUDA the memory is pinned, and copies run on a stream of their own: they begin behind the work that the step has
enqueued so far, and the next steps do not wait for them. On a CPU, where staging serves tests alone, a copy has ended
when it was started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import PagedKVCache, Slots

DEFAULT_STAGING_BYTES = 1 << 30


def num_staging_slots(num_bytes: int | None, num_blocks: int, bytes_per_block: int) -> int:
    """Return the slots of a ring of `num_bytes` (None: 1 GiB): at least one, at most one per block of the pool."""
    num_bytes = DEFAULT_STAGING_BYTES if num_bytes is None else num_bytes
    return max(1, min(num_blocks, num_bytes // bytes_per_block))


class StagingMemory:
    """Implements `tandem_engine.staging.SlotMemory`."""

    def __init__(
        self,
        region_id: str,
        cache: PagedKVCache,
        slots: Slots,
        checksums: Callable[[Sequence[int]], list[int]] = lambda slots: [],
    ) -> None:
        """`checksums` returns those of slots' bytes, or an empty list."""
        self.region_id = region_id
        self.num_slots = slots.num_slots
        self.slots = slots
        self.generations = slots.generations
        self._cache = cache
        self._checksums = checksums
        self._stream = _pinned_stream(self.slots.rows, cache.device) if cache.device.type == "cuda" else None
        self._batches: deque[tuple[torch.cuda.Event, int]] = deque()
        self._num_copied = 0

    def start_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self._stream is None:
            self._cache.copy_to(self.slots.rows, pairs)
            self._num_copied += len(pairs)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            self._cache.copy_to(self.slots.rows, pairs)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(self._stream)
        self._batches.append((ended, len(pairs)))

    def take_copied(self, *, wait: bool = False) -> int:
        while self._batches:
            ended, num_pairs = self._batches[0]
            if wait:
                ended.synchronize()
            elif not ended.query():  # type: ignore[no-untyped-call]
                break
            self._batches.popleft()
            self._num_copied += num_pairs
        taken, self._num_copied = self._num_copied, 0
        return taken

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return self._checksums(slots)


def _pinned_stream(rows: torch.Tensor, device: torch.device) -> torch.cuda.Stream:
    """Pin memory for copies from a card, and return a stream for them."""
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(rows.data_ptr(), rows.numel(), 0)
    if int(error) != 0:
        raise ModelUnusable(
            f"CUDA cannot pin {rows.numel():,} bytes of host memory for the hand-over of KV (error {int(error)}); "
            "give less with --kv-staging-bytes, or raise the limit of locked memory"
        )
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
