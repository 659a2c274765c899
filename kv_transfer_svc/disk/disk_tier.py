"""Keeps KV blocks on disk, so that they outlive their place in memory and the process.

A thread of the tier reads and writes segment files (segment_log.py). The event loop queues jobs and is called back; it
never waits for the disk. The tier may forget any block at any time, and never serves a block that differs from what was
written.

    put ──▶ queue, bounded in bytes ──▶ ┐
                                        ├──▶ thread: reads, then moves out of old segments, then writes ──▶ files
    get ──▶ queue, bounded in blocks ─▶ ┘            │
     ◀── verified blocks, or None ───────────────────┘

Nothing is synced: segment.py lists what a crash may lose.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.disk.jobs import JobQueue, ReadJob, WriteJob
from kv_transfer_svc.disk.segment import record_bytes
from kv_transfer_svc.disk.segment_log import DiskCounters, SegmentLog, VerifiedBlock
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.known_blocks import BlockCounters
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MAX_QUEUED_READ_BLOCKS = 4096
_MAX_QUEUED_WRITE_BYTES = 64 << 20
_CALLBACKS_PER_TURN = 64
"""A block that has been written leaves memory on the event loop, in 20 us."""


@dataclass(frozen=True)
class DiskStats:
    """A snapshot of a disk tier. `serving` is False once the thread has ended, for any reason."""

    serving: bool
    budget_bytes: int
    num_bytes: int
    num_blocks: int
    num_segments: int
    queued_reads: int
    queued_writes: int
    queued_write_bytes: int
    counters: DiskCounters


class DiskTier:
    """KV blocks in files of one folder, under a byte budget. All methods are for one event loop."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        segment_bytes: int | None = None,
        *,
        max_queued_read_blocks: int = _MAX_QUEUED_READ_BLOCKS,
        max_queued_write_bytes: int = _MAX_QUEUED_WRITE_BYTES,
    ) -> None:
        """Raise InvalidRequest for a budget of less than four segments. Touches no disk: `open` does."""
        self._counters = DiskCounters()
        self._log = SegmentLog(folder, budget_bytes, segment_bytes, self._counters)
        self._queue = JobQueue(max_queued_read_blocks, max_queued_write_bytes)
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        """Callbacks to run on the event loop."""
        self._is_called = False
        """Whether the loop has been asked to run them."""
        self._thread: threading.Thread | None = None
        self._last_write_failed = False

    def count_in(self, counters: BlockCounters) -> None:
        """Count every block that is added or removed from now on; call before `open`."""
        self._log.index.counters = counters

    async def open(self) -> None:
        """Lock the folder and rebuild the index from its files; call once.

        Raises InvalidRequest if the folder cannot be used, Unavailable if another process owns the folder. After either
        error the service runs without its disk tier.
        """
        assert self._loop is None, "a disk tier is opened once"
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._log.open)
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    def put(
        self,
        key: BlockKey,
        payload: bytes | bytearray | memoryview,
        *,
        checksum: int | None = None,
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Queue a block to be written; return False, and count the refusal, if the block is refused. Never waits.

        `payload` is not copied and must not change until `done(is_kept)` has been called on the event loop. `done` of a
        refused block is never called. With `checksum`, made when the block was sealed, bytes that have changed since
        are not written. A block that is on disk or queued is not written again, and `done` is called.
        """
        assert 0 <= key.group < 1 << 32, f"{key} does not fit a record's header"
        if key in self:
            self._counters.duplicates += 1
            self._call_back(done, True)
            return True
        job = WriteJob(key, memoryview(payload).cast("B"), checksum, done)
        if not self._is_serving or job.num_bytes > self._log.segment_bytes or not self._queue.offer_write(job):
            self._counters.refused_writes += 1
            return False
        return True

    def contains(self, key: BlockKey) -> bool:
        """Return whether a `get` is likely to find `key`: on disk, or queued to be written."""
        return key in self._log.index or self._queue.unwritten(key) is not None

    __contains__ = contains

    async def get(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview] | None = None
    ) -> list[VerifiedBlock | None]:
        """Return each key's payload and checksum; None if it is missing, not whole, or not as long as its `into`.

        With `into`, bytes are read straight to their destination; where the answer is None, `into` is undefined. A
        cancelled caller gets its CancelledError only after the last write to `into`.
        """
        assert into is None or len(into) == len(keys), "one destination for each key"
        job = ReadJob(keys, into, asyncio.get_running_loop().create_future())
        if not self._is_serving or not self._queue.offer_read(job):
            self._counters.refused_reads += len(keys)
            return [None] * len(keys)
        try:
            return await asyncio.shield(job.answer)
        except asyncio.CancelledError:
            if not self._queue.withdraw_read(job):
                await _wait_through_cancels(job.answer)
            raise

    def forget(self, key: BlockKey) -> None:
        """Make `key` a miss, which saves its move to a new segment.

        Not an erasure: the bytes are deleted with their segment, and a restart before that finds them again. This is
        harmless, since the content of a key never changes.
        """
        self._queue.withdraw_write(key)
        self._log.index.drop(key)

    async def close(self) -> None:
        """Finish what is queued, then release the folder. May be called twice, and after a failed `open`."""
        self._queue.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        while self._ended:
            self._run_callbacks()
        self._log.close()

    def stats(self) -> DiskStats:
        return DiskStats(
            serving=self._is_serving,
            budget_bytes=self._log.budget_bytes,
            num_bytes=self._log.num_bytes,
            num_blocks=len(self._log.index),
            num_segments=self._log.num_segments,
            queued_reads=self._queue.num_read_blocks,
            queued_writes=self._queue.num_writes,
            queued_write_bytes=self._queue.num_write_bytes,
            counters=replace(self._counters),
        )

    def check(self) -> None:
        """Raise AssertionError unless index and files agree and the budget holds. Call with nothing queued."""
        self._log.check()

    @property
    def _is_serving(self) -> bool:
        return self._thread is not None and not self._queue.closed

    def _run(self) -> None:
        try:
            while not self._queue.drained:
                self._step()
        except Exception:
            log.exception("disk_tier_failed", folder=str(self._folder))
        finally:
            self._abandon()

    def _step(self) -> None:
        if (reading := self._queue.next_read()) is not None:
            self._read(reading)
        elif self._log.tidy():
            return
        elif (writing := self._queue.next_write()) is not None:
            self._write(writing)
        else:
            self._queue.wait()

    def _abandon(self) -> None:
        """Answer every waiting caller if the thread ends before its work is done."""
        self._queue.close()
        while (reading := self._queue.next_read()) is not None:
            self._end_read(reading, [None] * len(reading.keys))
        while (writing := self._queue.next_write()) is not None:
            self._end_write(writing, False)

    def _read(self, job: ReadJob) -> None:
        blocks: list[VerifiedBlock | None] = [None] * len(job.keys)
        try:
            for index, key in enumerate(job.keys):
                if job.withdrawn:
                    break
                blocks[index] = self._read_block(key, None if job.into is None else job.into[index])
        finally:
            self._end_read(job, blocks)

    def _read_block(self, key: BlockKey, into: memoryview | None) -> VerifiedBlock | None:
        unwritten = self._queue.unwritten(key)
        block = self._log.read(key, into) if unwritten is None else _copy(unwritten, into)
        if block is None:
            self._counters.misses += 1
        else:
            self._counters.hits += 1
        return block

    def _end_read(self, job: ReadJob, blocks: list[VerifiedBlock | None]) -> None:
        self._queue.end_read(job)
        self._call_back(_answer, job.answer, blocks)

    def _write(self, job: WriteJob) -> None:
        is_kept = False
        try:
            is_kept = not job.withdrawn and self._append(job)
        finally:
            if is_kept and job.withdrawn:  # `forget` was called during the write
                self._log.index.drop(job.key)
            self._end_write(job, is_kept and not job.withdrawn)

    def _append(self, job: WriteJob) -> bool:
        checksum = block_checksum(job.payload)
        if job.checksum is not None and checksum != job.checksum:
            self._counters.put_corrupt += 1
            log.warning("disk_put_corrupt", block=job.key.block_hash.hex())
            return False
        try:
            self._log.append(job.key, job.payload, checksum)
        except OSError as error:
            self._counters.write_errors += 1
            if not self._last_write_failed:  # once per run of failures
                log.warning("disk_write_failed", folder=str(self._folder), error=str(error))
            self._last_write_failed = True
            return False
        self._last_write_failed = False
        self._counters.written += 1
        self._counters.written_bytes += record_bytes(len(job.payload))
        return True

    def _end_write(self, job: WriteJob, is_kept: bool) -> None:
        self._queue.end_write(job)
        self._call_back(job.done, is_kept)

    def _call_back(self, callback: Callable[..., None] | None, *arguments: object) -> None:
        if callback is None or self._loop is None:
            return
        self._ended.append((callback, arguments))
        if not self._is_called:  # after the append: a run that clears it finds the entry
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        """Run callbacks on the event loop, some in each of its turns: thousands of writes end while it waits."""
        assert self._loop is not None, "called by the loop"
        self._is_called = False
        try:
            for _ in range(min(len(self._ended), _CALLBACKS_PER_TURN)):
                callback, arguments = self._ended.popleft()
                callback(*arguments)
        finally:
            if self._ended and not self._is_called:
                self._is_called = True
                self._loop.call_soon(self._run_callbacks)


def _copy(job: WriteJob, into: memoryview | None) -> VerifiedBlock | None:
    """Return a queued payload; None if it has changed since it was sealed, or is not as long as `into`."""
    if into is not None and len(into) != len(job.payload):
        return None
    payload = memoryview(bytearray(len(job.payload))) if into is None else into
    payload[:] = job.payload
    checksum = block_checksum(payload)
    return VerifiedBlock(payload, checksum) if job.checksum in (None, checksum) else None


def _answer(answer: asyncio.Future[list[VerifiedBlock | None]], blocks: list[VerifiedBlock | None]) -> None:
    if not answer.done():
        answer.set_result(blocks)


async def _wait_through_cancels(answer: asyncio.Future[list[VerifiedBlock | None]]) -> None:
    """Wait for `answer`; cancellations do not end the wait."""
    while not answer.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([answer])
