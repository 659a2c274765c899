"""The KV service takes memory as it uses it, and stores no more than this host's workers have in their pools."""

from __future__ import annotations

import os
import time

from kv_transfer_svc.blocks.allocator import PAGE_BYTES, BlockAllocator
from kv_transfer_svc.blocks.free_list import FreeList
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.region_table import RegionTable
from tandem_runtime.kv.regions import RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion


def test_memory_is_taken_as_it_is_used() -> None:
    region = SharedRegion.reserve("test", 64 << 20, 16)
    try:
        assert _resident_bytes(region) == 0
        region.take(1)
        assert _resident_bytes(region) == 4 << 20, "some megabytes ahead"
        region.take(4 << 20)
        region.take(9 << 20)
        assert _resident_bytes(region) == 12 << 20
        region.take(64 << 20)
        assert _resident_bytes(region) == 64 << 20
    finally:
        region.close()


def _resident_bytes(region: SharedRegion) -> int:
    return 512 * os.fstat(region.fd).st_blocks


async def test_the_store_grows_with_the_pools_that_workers_lend() -> None:
    regions = RegionTable(on_lost=lambda offer: None)
    allocator = BlockAllocator(1 << 20, initial_bytes=0)
    cache = HostCache(allocator, None, regions, "store", time.time)
    assert (allocator.total_bytes, allocator.allocate(PAGE_BYTES)) == (0, None)
    for name, num_bytes, num_pages in (("a", 64 << 10, 4), ("b", 128 << 10, 12), ("c", 8 << 20, 256)):
        pool = SharedRegion.create(name, num_bytes, 1)
        offer = RegionOffer(name, name, pool.total_bytes, 1, num_bytes, pool.generations_offset)
        regions.take(offer, os.dup(pool.fd), object())
        pool.close()
        assert allocator.total_bytes == num_pages * PAGE_BYTES, "a quarter of the pools, and no more than a MiB"
        assert allocator.allocate(PAGE_BYTES) is not None
        allocator.check()
    regions.close()
    await cache.close()


def test_free_pages_at_the_end_become_one_hole_with_those_that_are_added() -> None:
    pages = FreeList(4)
    first = pages.allocate(2)
    pages.grow(8)
    pages.check()
    assert (first, pages.allocate(6), pages.allocate(1)) == (0, 2, None)
    pages.grow(3)
    assert pages.num_pages == 8, "never fewer"
    pages.grow(10)
    pages.check()
    assert pages.allocate(2) == 8
