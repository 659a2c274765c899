"""Tests of pieces and link stats: cuts and checksums cover every byte, for blocks of any size."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from control_plane.fleet.registration_bounds import check_load
from kv_transfer_svc.transport.pieces import (
    GROUP_BYTES,
    RunningChecksums,
    groups,
    leading,
    rest_of,
    run_interruptible,
)
from kv_transfer_svc.transport.stats import LinkStats
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.checksum import block_checksum

SIZES = some.lists(some.one_of(some.integers(1, 9000), some.integers(1, 3 << 20)), min_size=1, max_size=80)


@settings(deadline=None, max_examples=30)
@given(SIZES.filter(lambda sizes: sum(sizes) < 8 << 20))
def test_pieces_are_the_blocks_in_order_and_sum_to_their_checksums(sizes: list[int]) -> None:
    blocks = [memoryview(bytes([index % 251]) * size) for index, size in enumerate(sizes)]
    made = RunningChecksums(blocks)
    together = bytearray()
    for group in groups(blocks):
        assert sum(map(len, group)) <= GROUP_BYTES and len(group) <= 64
        made.add(group)
        together += b"".join(group)
    assert together == b"".join(blocks)
    assert made.values == [block_checksum(block) for block in blocks]


def test_leading_blocks_end_with_a_block() -> None:
    blocks = [memoryview(bytes(size)) for size in (3, 4, 5)]
    assert [len(leading(blocks, num_bytes) or ()) for num_bytes in (3, 7, 12)] == [1, 2, 3]
    assert leading(blocks, 0) == []
    assert leading(blocks, 4) is None and leading(blocks, 13) is None


def test_the_rest_of_a_group_is_what_has_not_moved() -> None:
    group = [memoryview(b"abc"), memoryview(b"defg"), memoryview(b"h")]
    assert [bytes(piece) for piece in rest_of(group, 4)] == [b"efg", b"h"]
    assert rest_of(group, 8) == []


def test_small_transfers_tell_latency_and_large_ones_speed() -> None:
    stats = LinkStats()
    stats.transferred(1000, 5.0, 5.002)
    assert stats.latency_seconds == pytest.approx(0.002) and stats.bytes_per_second == 0.0
    stats.transferred(1 << 20, 6.0, 6.001)
    assert stats.bytes_per_second == pytest.approx((1 << 20) / 0.001) and stats.slowness == ""


def test_transfers_at_once_are_one_run_whose_time_counts_once() -> None:
    stats = LinkStats()
    for begun in (10.0, 20.0):  # four windows each, which share the link after a round trip of 80 ms
        for number in range(4):
            stats.transferred(4 << 20, begun, begun + 0.08 + 0.04 * (number + 1))
        stats.transferred(4 << 20, begun + 0.2, begun + 0.28)  # begins before the last one has ended
    own_seconds = 1 / stats.bytes_per_second - 0.08 / stats.bytes_per_run
    assert own_seconds == pytest.approx(0.04 / (4 << 20))
    assert 1 / stats.bytes_per_second < 0.08 / (4 << 20)
    one_by_one = LinkStats()
    for number in range(20):
        one_by_one.transferred(4 << 20, number, number + 0.1)
    assert one_by_one.bytes_per_second == pytest.approx((4 << 20) / 0.1)
    assert one_by_one.bytes_per_run == pytest.approx(4 << 20)


def test_a_run_without_end_has_a_length_that_gateways_accept() -> None:
    stats = LinkStats()
    for number in range(10_000):
        stats.transferred(4 << 20, number, number + 2.0)
    link = pb.KvLink(bytes_per_run=stats.bytes_per_run, bytes_per_second=stats.bytes_per_second)
    load = pb.LoadReport(kv_service=pb.KvServiceLoad(links=[link]))
    check_load(load, is_first=True)
    assert stats.bytes_per_run > 1 << 30
    load.kv_service.links[0].bytes_per_run = math.inf
    with pytest.raises(InvalidRequest):
        check_load(load)


def test_a_small_transfer_beside_others_says_nothing_of_the_latency() -> None:
    stats = LinkStats()
    stats.transferred(1000, 0.0, 0.002)
    stats.transferred(1000, 1.0, 1.9, is_alone=False)
    assert stats.latency_seconds == pytest.approx(0.002) and stats.num_transfers == 2


@pytest.mark.parametrize(("finish_seconds", "is_interrupted"), [(60.0, False), (0.0, True)])
async def test_a_cancelled_caller_lets_work_end_and_interrupts_it_only_after_a_while(
    finish_seconds: float, is_interrupted: bool
) -> None:
    may_end, interrupted = threading.Event(), threading.Event()

    def interrupt() -> None:
        interrupted.set()
        may_end.set()

    with ThreadPoolExecutor(1) as threads:
        work = partial(may_end.wait, 30)
        calling = asyncio.ensure_future(run_interruptible(threads, work, interrupt, finish_seconds))
        await asyncio.sleep(0)
        calling.cancel()
        if not is_interrupted:
            may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert interrupted.is_set() == is_interrupted


def test_a_probe_is_the_beginning_of_the_averages() -> None:
    stats, probed = LinkStats(), LinkStats()
    stats.transferred(16 << 20, 0.0, 1.0)
    probed.measured(0, 5.0, 5.08)
    probed.measured(1 << 20, 6.0, 6.1)
    stats.begin_with(probed)
    assert stats.bytes_per_second == pytest.approx((1 << 20) / 0.1) and stats.bytes_per_run == 1 << 20
    assert stats.latency_seconds == pytest.approx(0.08) and stats.num_bytes == 16 << 20


def test_a_link_much_below_its_own_best_is_slow() -> None:
    stats = LinkStats()
    stats.transferred(16 << 20, 0.0, 0.01)
    for second in range(1, 16):
        stats.transferred(16 << 20, second, second + 1.0)
    assert stats.slowness == "slow: 1% of its best"
    stats.reset_rate()
    assert stats.slowness == ""
