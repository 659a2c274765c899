"""What does a disk tier count?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DiskCounters:
    """Counts since the tier was made. Each is written by one thread, and read by anyone."""

    hits: int = 0
    misses: int = 0
    disk_corrupt: int = 0
    """Records that were not what was written: dropped and reported as misses."""
    discarded: int = 0
    """Torn or bad stretches found when the index was rebuilt."""
    read_errors: int = 0
    refused_reads: int = 0
    """Blocks asked for while the queue of reads was full: reported as misses, not counted in `misses`."""
    written: int = 0
    written_bytes: int = 0
    duplicates: int = 0
    refused_writes: int = 0
    """Blocks not taken: the queue of writes was full, the tier closed, or the block longer than a segment."""
    put_corrupt: int = 0
    """Blocks whose bytes, as they were about to be written, did not match the checksum given with them."""
    write_errors: int = 0
    rewritten: int = 0
    """Blocks that got a second chance: written again as their segment went."""
    evicted: int = 0


@dataclass(frozen=True)
class DiskFigures:
    """One moment of a disk tier. `serving` turns False when its thread has ended, whyever."""

    serving: bool
    budget_bytes: int
    num_bytes: int
    num_blocks: int
    num_segments: int
    queued_reads: int
    queued_writes: int
    queued_write_bytes: int
    counters: DiskCounters
