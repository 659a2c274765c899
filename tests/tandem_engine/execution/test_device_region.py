"""Tests pools in device memory, with a stand-in for NVIDIA's driver: bits, generations, refusals, and what is kept."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace

from tandem_engine.errors import ModelUnusable, RegionError
from tandem_engine.execution.cuda_vmm import Driver
from tandem_engine.execution.device_pool import allocate_region
from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.model_runner import _runs
from tandem_engine.messages import ExtentRef, MapRegion
from tests.cuda_driver import stub_library

CPU = torch.device("cpu")
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.float32)
SIZE = GEOMETRY.bytes_per_block
NUM_BLOCKS = 6


def device_pool() -> PagedKVCache:
    return PagedKVCache(GEOMETRY, NUM_BLOCKS, CPU, device_region=allocate_region(CPU, NUM_BLOCKS, SIZE, stub_library()))


def map_command(owner: PagedKVCache, **changes: object) -> MapRegion:
    command = MapRegion("owner", owner.region_bytes, NUM_BLOCKS, owner.generations_offset, "device")
    return replace(command, **changes)


def extent(owner: PagedKVCache, slot: int) -> ExtentRef:
    return ExtentRef("owner", slot * SIZE, SIZE, slot, owner.generations[slot])


def fill(cache: PagedKVCache) -> None:
    cache.pool.rows.copy_(torch.randn(cache.pool.rows.shape))


def num_held() -> list[int]:
    return [ctypes.CDLL(stub_library()).tandem_stub_num_held(kind) for kind in range(3)]


@dataclass
class Pair:
    owner: PagedKVCache
    regions: MappedRegions


@pytest.fixture
def pair() -> Iterator[Pair]:
    owner, regions = device_pool(), MappedRegions(lambda: Driver(library=stub_library()))
    fill(owner)
    fds = [os.dup(fd) for fd in owner.region_fds]
    regions.map(map_command(owner), *fds)
    for fd in fds:
        os.close(fd)
    yield Pair(owner, regions)


@pytest.mark.parametrize("is_reader_in_device_memory", [True, False])
def test_imported_blocks_are_the_owners_bit_for_bit(pair: Pair, is_reader_in_device_memory: bool) -> None:
    reader = device_pool() if is_reader_in_device_memory else PagedKVCache(GEOMETRY, NUM_BLOCKS, CPU)
    assert (reader.device_address(0) is not None) == is_reader_in_device_memory
    blocks, slots = [3, 4, 0], [1, 2, 5]
    extents = [extent(pair.owner, slot) for slot in slots]
    for first, run in _runs(blocks, extents):
        pair.regions.copy(run, reader, first)
    pair.regions.check_generations(extents)
    for block, slot in zip(blocks, slots, strict=True):
        assert reader.read_block(block) == pair.owner.read_block(slot) != bytes(SIZE)
    assert reader.read_block(1) == bytes(SIZE)


def test_a_slot_handed_out_again_is_noticed(pair: Pair) -> None:
    described = extent(pair.owner, 2)
    pair.owner.generations[2] += 1
    with pytest.raises(RegionError, match="slot 2 of region owner has generation 1 now, expected 0"):
        pair.regions.check_generations([described])


def test_an_extent_outside_its_region_is_refused(pair: Pair) -> None:
    good = extent(pair.owner, 1)
    for wrong in (
        replace(good, offset=NUM_BLOCKS * SIZE),
        replace(good, offset=-SIZE),
        replace(good, slot=NUM_BLOCKS),
        replace(good, num_bytes=NUM_BLOCKS * SIZE),
    ):
        with pytest.raises(RegionError, match="outside region owner"):
            pair.regions.copy(wrong, device_pool(), 0)
    with pytest.raises(RegionError, match="slots 6 to 6 are not all in region owner"):
        pair.regions.check_generations([replace(good, slot=NUM_BLOCKS)])


def test_a_reader_keeps_the_memory_of_an_owner_that_is_gone_until_it_unmaps_it() -> None:
    before = num_held()
    owner, regions = device_pool(), MappedRegions(lambda: Driver(library=stub_library()))
    fill(owner)
    regions.map(map_command(owner), *owner.region_fds)
    expected, described = owner.read_block(4), extent(owner, 4)
    del owner
    assert regions.read(described).tobytes() == expected
    regions.unmap("owner")
    assert num_held() == before


def test_a_tensor_of_the_pool_keeps_its_memory() -> None:
    before = num_held()
    rows = device_pool().pool.rows
    rows += 1
    assert float(rows.sum()) == rows.numel()
    del rows
    assert num_held() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": NUM_BLOCKS + 1000}, "8048 for 1006 slots"),
        ({"generations_offset": 8}, "from byte 8 on, do not fit"),
        ({"num_bytes": 64 << 20}, "cannot be mapped: the CUDA driver's cuMemMap failed"),
    ],
)
def test_descriptors_that_do_not_fit_the_command_are_refused(
    pair: Pair, changes: dict[str, object], message: str
) -> None:
    before = num_held()
    with pytest.raises(RegionError, match=message):
        MappedRegions(lambda: Driver(library=stub_library())).map(
            map_command(pair.owner, **changes), *pair.owner.region_fds
        )
    assert num_held() == before


def test_swapped_or_missing_descriptors_are_refused(pair: Pair) -> None:
    regions, (table, memory) = MappedRegions(lambda: Driver(library=stub_library())), pair.owner.region_fds
    with pytest.raises(RegionError, match="is not sealed"):
        regions.map(map_command(pair.owner), memory, table)
    with pytest.raises(RegionError, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_INVALID_VALUE"):
        regions.map(map_command(pair.owner), table, table)
    with pytest.raises(RegionError, match="came with one descriptor of two"):
        regions.map(map_command(pair.owner), table)


def test_a_worker_without_a_driver_refuses_the_region_and_its_copies_name_why(pair: Pair) -> None:
    regions = MappedRegions(lambda: Driver(library="libcuda.so.none"))
    why = r"region owner is in MEMORY_KIND_DEVICE, which this worker cannot map: no CUDA driver.*--kv-region host"
    with pytest.raises(RegionError, match=why):
        regions.map(map_command(pair.owner), *pair.owner.region_fds)
    with pytest.raises(RegionError, match=why):
        regions.copy(extent(pair.owner, 0), device_pool(), 0)
    regions.unmap("owner")
    with pytest.raises(RegionError, match="region owner is not mapped here"):
        regions.read(extent(pair.owner, 0))


def test_a_pool_that_cannot_be_allocated_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnusable, match=r"not possible here: no CUDA driver.*take --kv-region host"):
        allocate_region(CPU, 4, SIZE, "libcuda.so.none")
    monkeypatch.setenv("CUDA_STUB_BYTES", "100")
    with pytest.raises(ModelUnusable, match=r"4 blocks of .* CUDA_ERROR_OUT_OF_MEMORY; take a smaller pool"):
        allocate_region(CPU, 4, SIZE, stub_library())
    monkeypatch.setattr(Driver, "is_host_addressable", False)
    with pytest.raises(ModelUnusable, match="the model runs on cpu; take --kv-region host, or --device cuda"):
        allocate_region(CPU, 4, SIZE, stub_library())
