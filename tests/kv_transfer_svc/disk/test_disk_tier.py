"""Tests of the disk tier: put, get, restart, faults and cancellations."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.disk.segment import Segment
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.checksum import block_checksum
from tests.kv_transfer_svc.disk.blocks import a_key, a_payload, put_all, served

_BUDGET_BYTES = 4 << 20


async def test_a_block_comes_back_as_it_was_put_also_after_a_restart(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        assert await put_all(tier, range(10), 5000) == [True] * 10
        assert await served(tier, range(12), 5000) == list(range(10))
    async with a_tier(tmp_path) as tier:
        assert a_key(9) in tier and a_key(10) not in tier
        assert await served(tier, range(12), 5000) == list(range(10))
        counters = tier.stats().counters
        assert (counters.hits, counters.misses, counters.discarded) == (10, 2, 0)
        tier.check()


async def test_bytes_are_read_straight_to_where_they_belong(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0, 1], 1000)
        pool = memoryview(bytearray(3000))
        into = [pool[2000:], pool[:1000], pool[1000:2000]]
        first, second, third = await tier.get([a_key(0), a_key(1), a_key(2)], into)
        assert first is not None and second is not None and third is None
        assert first.payload is into[0] and second.payload is into[1]
        assert (first.checksum, second.checksum) == (block_checksum(into[0]), block_checksum(into[1]))
        assert pool[2000:] == a_payload(0, 1000) and pool[:1000] == a_payload(1, 1000)


async def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0, 0, 0])
        stats = tier.stats()
        assert (stats.num_blocks, stats.num_bytes, stats.counters.duplicates) == (1, 512, 2)


async def test_reads_overtake_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    _noting(monkeypatch, "append", order)
    _noting(monkeypatch, "read", order)
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0])
        with _Held(monkeypatch, "append") as held:
            writes = [_put(tier, 1)]
            await asyncio.to_thread(held.reached.wait)  # the thread is in a write
            writes += [_put(tier, number) for number in (2, 3)]
            reading = asyncio.ensure_future(served(tier, [0]))
            await _until(lambda: tier.stats().queued_reads == 1)
            held.go_on.set()
            assert await reading == [0]
            assert all(await asyncio.gather(*writes))
        assert order == ["append", "append", "read", "append", "append"]


async def test_a_full_queue_refuses_and_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_tier(tmp_path, max_queued_write_bytes=1024, max_queued_read_blocks=2) as tier:
        with _Held(monkeypatch, "append") as held:
            writes = [_put(tier, 0)]
            await asyncio.to_thread(held.reached.wait)
            writes.append(_put(tier, 1))
            assert not tier.put(a_key(2), a_payload(2))
            reading = asyncio.ensure_future(served(tier, [0, 1]))
            await _until(lambda: tier.stats().queued_reads == 2)
            assert await served(tier, [0]) == []
            stats = tier.stats()
            assert (stats.queued_writes, stats.queued_write_bytes) == (2, 1024)
            assert (stats.counters.refused_writes, stats.counters.refused_reads) == (1, 1)
            held.go_on.set()
            assert await reading == [0, 1]
            assert await asyncio.gather(*writes) == [True, True]
        stats = tier.stats()
        assert (stats.queued_reads, stats.queued_writes, stats.queued_write_bytes) == (0, 0, 0)
        assert await put_all(tier, [2]) == [True]


async def test_a_block_is_served_while_it_waits_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_tier(tmp_path) as tier:
        with _Held(monkeypatch, "append") as held:
            first = _put(tier, 0)
            await asyncio.to_thread(held.reached.wait)
            second = _put(tier, 1)
            reading = asyncio.ensure_future(tier.get([a_key(1)], [memoryview(bytearray(384))]))
            await _until(lambda: tier.stats().queued_reads == 1)
            assert a_key(1) in tier
            held.go_on.set()
            (block,) = await reading
            assert block is not None and bytes(block.payload) == a_payload(1)
            assert await first and await second


async def test_bytes_that_changed_since_they_were_sealed_are_not_written(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        payload = bytearray(a_payload(0))
        sealed = block_checksum(bytes(payload))
        payload[100] ^= 1
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        assert tier.put(a_key(0), payload, checksum=sealed, done=done.set_result)
        assert not await done
        assert await served(tier, [0]) == []
        assert tier.stats().counters.put_corrupt == 1


async def test_a_flipped_bit_is_a_counted_miss_and_the_block_can_be_put_again(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, range(3))
        path = tmp_path / "segment-000000000000.tkv"
        content = bytearray(path.read_bytes())
        content[512 + 128 + 200] ^= 4
        path.write_bytes(content)
        assert await served(tier, range(3)) == [0, 2]
        assert a_key(1) not in tier
        assert tier.stats().counters.disk_corrupt == 1
        await put_all(tier, [1])
        assert await served(tier, range(3)) == [0, 1, 2]


async def test_a_full_disk_costs_new_blocks_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0])
        with monkeypatch.context() as full_disk:
            full_disk.setattr(os, "pwritev", _half_then_no_space())
            assert await put_all(tier, [1, 2]) == [False, False]
            assert await served(tier, range(3)) == [0]
        assert tier.stats().counters.write_errors == 2
        assert await put_all(tier, [1]) == [True]
        assert await served(tier, range(3)) == [0, 1]
        tier.check()


async def test_a_forgotten_block_is_a_miss_and_moves_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0])
        tier.forget(a_key(0))
        assert await served(tier, [0]) == []
        with _Held(monkeypatch, "append") as held:
            writing = _put(tier, 1)
            await asyncio.to_thread(held.reached.wait)
            queued = _put(tier, 2)
            tier.forget(a_key(1))
            tier.forget(a_key(2))
            assert a_key(1) not in tier and a_key(2) not in tier
            held.go_on.set()
            assert not await writing and not await queued
        assert tier.stats().num_blocks == 0
        tier.check()


async def test_a_cancelled_reader_leaves_only_when_nothing_is_read_to_its_memory_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0, 1])
        into = [memoryview(bytearray(384)) for _ in range(2)]
        with _Held(monkeypatch, "read") as held:
            reading = asyncio.ensure_future(tier.get([a_key(0), a_key(1)], into))
            await asyncio.to_thread(held.reached.wait)
            queued = asyncio.ensure_future(tier.get([a_key(0)], [memoryview(bytearray(384))]))
            await _until(lambda: tier.stats().queued_reads == 3)
            for _ in range(3):
                reading.cancel()
                await asyncio.wait([reading], timeout=0)
            assert not reading.done()
            queued.cancel()  # not started: nothing to wait for
            await asyncio.wait([queued])
            held.go_on.set()
            await asyncio.wait([reading])
        assert reading.cancelled()
        assert into[1] == bytes(384)  # the read did not start after the cancellation
        assert tier.stats().queued_reads == 0


async def test_writes_that_ended_while_the_loop_stood_still_are_told_over_many_of_its_turns(tmp_path: Path) -> None:
    """Each frees memory on the loop: thousands in one turn would make it stand still again."""
    num_told = 0

    def tell(is_kept: bool) -> None:
        nonlocal num_told
        num_told += is_kept

    async with a_tier(tmp_path) as tier:
        for number in range(300):
            assert tier.put(a_key(number), a_payload(number, 100), done=tell)
        while tier.stats().counters.written < 300:
            threading.Event().wait(0.001)
        most = 0
        while num_told < 300:
            num_before = num_told
            await asyncio.sleep(0)
            most = max(most, num_told - num_before)
    assert most <= 64


async def test_closing_writes_what_is_queued_and_then_refuses(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, _BUDGET_BYTES)
    await tier.open()
    writes = [_put(tier, number) for number in range(100)]
    await tier.close()
    assert all(write.result() for write in writes)
    assert not tier.put(a_key(100), b"late")
    assert await served(tier, [0]) == []
    assert not tier.stats().serving
    await tier.close()
    async with a_tier(tmp_path) as tier:
        assert await served(tier, range(100)) == list(range(100))


async def test_a_second_owner_is_refused_and_can_be_closed(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        second = DiskTier(tmp_path, _BUDGET_BYTES)
        with pytest.raises(Unavailable):
            await second.open()
        assert not second.put(a_key(0), b"payload")
        assert await second.get([a_key(0)]) == [None]
        await second.close()
        assert await put_all(tier, [0]) == [True]


async def test_a_thread_that_breaks_answers_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_tier(tmp_path) as tier:
        await put_all(tier, [0])

        def broken(*_: object) -> None:
            raise RuntimeError("a mistake of ours")

        with _Held(monkeypatch, "append") as held:
            writing = _put(tier, 1)
            await asyncio.to_thread(held.reached.wait)
            monkeypatch.setattr(Segment, "read", broken)
            reads = [asyncio.ensure_future(served(tier, [0])) for _ in range(2)]
            queued = _put(tier, 2)
            await _until(lambda: tier.stats().queued_reads == 2)
            held.go_on.set()
            assert await asyncio.gather(*reads) == [[], []]
            assert (await writing, await queued) == (True, False)
        await _until(lambda: not tier.stats().serving)
        assert not tier.put(a_key(3), b"payload")


async def test_a_block_longer_than_a_segment_is_refused(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        assert not tier.put(a_key(0), bytes(1 << 20))
        assert tier.stats().counters.refused_writes == 1


async def test_the_budget_is_held_and_what_is_used_stays(tmp_path: Path) -> None:
    async with a_tier(tmp_path) as tier:
        for number in range(200):
            await put_all(tier, [number], 64_000)
            assert await served(tier, [0], 64_000) == [0]
            assert tier.stats().num_bytes <= _BUDGET_BYTES
        assert tier.stats().counters.rewritten > 0
        tier.check()


@asynccontextmanager
async def a_tier(folder: Path, **limits: int) -> AsyncIterator[DiskTier]:
    tier = DiskTier(folder, _BUDGET_BYTES, 1 << 20, **limits)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


class _Held:
    """Make the first call of a method of Segment set `reached` and wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._monkeypatch = monkeypatch
        self._method = method

    def __enter__(self) -> _Held:
        real: Callable[..., Any] = getattr(Segment, self._method)

        def waits(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(30)
            return real(*arguments)

        self._monkeypatch.setattr(Segment, self._method, waits)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()


def _noting(monkeypatch: pytest.MonkeyPatch, method: str, order: list[str]) -> None:
    real: Callable[..., Any] = getattr(Segment, method)

    def noting(*arguments: Any) -> Any:
        order.append(method)
        return real(*arguments)

    monkeypatch.setattr(Segment, method, noting)


def _put(tier: DiskTier, number: int) -> asyncio.Future[bool]:
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    assert tier.put(a_key(number), a_payload(number), done=done.set_result)
    return done


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition changes in another thread
            await asyncio.sleep(0)


def _half_then_no_space() -> Callable[..., int]:
    """Return a write to a full disk: the first call writes 200 bytes of a record, the next call fails."""
    real = os.pwritev

    def pwritev(file: int, parts: list[memoryview], offset: int) -> int:
        if offset % 512 == 0:
            return real(file, [b"".join(parts)[:200]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return pwritev
