"""Queues reads and writes for the disk tier's thread.

Reads come first: a request waits for them, while a write only delays the next eviction. Both queues are bounded. A full
queue refuses a job, and no caller waits for space.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk.segment import record_bytes
from kv_transfer_svc.disk.segment_log import VerifiedBlock


@dataclass(eq=False)
class ReadJob:
    """A read. The thread writes to `into`, if given, until `answer` is set."""

    keys: Sequence[BlockKey]
    into: Sequence[memoryview] | None
    answer: asyncio.Future[list[VerifiedBlock | None]]
    withdrawn: bool = False


@dataclass(eq=False)
class WriteJob:
    """A write. The thread reads `payload` until `done` is called."""

    key: BlockKey
    payload: memoryview
    checksum: int | None
    done: Callable[[bool], None] | None
    withdrawn: bool = False

    @property
    def num_bytes(self) -> int:
        return record_bytes(len(self.payload))


class JobQueue:
    """Two bounded queues from the event loop to the thread."""

    def __init__(self, max_read_blocks: int, max_write_bytes: int) -> None:
        self._max_read_blocks = max_read_blocks
        self._max_write_bytes = max_write_bytes
        self._changed = threading.Condition()
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._unwritten: dict[BlockKey, WriteJob] = {}  # queued or being written
        self._closed = False
        self.num_read_blocks = 0
        self.num_write_bytes = 0

    @property
    def num_writes(self) -> int:
        return len(self._unwritten)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def drained(self) -> bool:
        """Whether the queue is closed and empty."""
        with self._changed:
            return self._closed and not self._reads and not self._writes

    def offer_read(self, job: ReadJob) -> bool:
        with self._changed:
            if self._closed or self.num_read_blocks + len(job.keys) > self._max_read_blocks:
                return False
            self._reads.append(job)
            self.num_read_blocks += len(job.keys)
            self._changed.notify()
            return True

    def offer_write(self, job: WriteJob) -> bool:
        with self._changed:
            if self._closed or self.num_write_bytes + job.num_bytes > self._max_write_bytes:
                return False
            self._writes.append(job)
            self._unwritten[job.key] = job
            self.num_write_bytes += job.num_bytes
            self._changed.notify()
            return True

    def withdraw_read(self, job: ReadJob) -> bool:
        """Withdraw a read that no caller waits for; False if the thread has it and uses `into` until `answer`."""
        with self._changed:
            job.withdrawn = True
            if job not in self._reads:
                return False
            self._reads.remove(job)
            self.num_read_blocks -= len(job.keys)
            return True

    def withdraw_write(self, key: BlockKey) -> bool:
        """Cancel the write of `key`; its job still passes the thread, so `done` is called."""
        with self._changed:
            job = self._unwritten.pop(key, None)
            if job is None:
                return False
            job.withdrawn = True
            return True

    def unwritten(self, key: BlockKey) -> WriteJob | None:
        return self._unwritten.get(key)

    def next_read(self) -> ReadJob | None:
        with self._changed:
            return self._reads.popleft() if self._reads else None

    def next_write(self) -> WriteJob | None:
        with self._changed:
            return self._writes.popleft() if self._writes else None

    def wait(self) -> None:
        """Sleep until there is a job or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._writes or self._closed)

    def end_read(self, job: ReadJob) -> None:
        with self._changed:
            self.num_read_blocks -= len(job.keys)

    def end_write(self, job: WriteJob) -> None:
        with self._changed:
            self.num_write_bytes -= job.num_bytes
            if self._unwritten.get(job.key) is job:
                del self._unwritten[job.key]

    def close(self) -> None:
        """Accept no more jobs; queued jobs are still done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
