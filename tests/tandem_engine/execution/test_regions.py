"""Tests that blocks are copied between pools bit for bit, and that a late reader gets an error."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache, Slots
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.staging import StagingMemory
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.steps import step_of

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.float32)
NUM_BLOCKS = 6


@dataclass
class Pair:
    """A pool that lends its region, and a runner with a pool of its own that has mapped it."""

    owner: PagedKVCache
    reader: ModelRunner
    pool: PagedKVCache

    def extent(self, slot: int) -> ExtentRef:
        size = GEOMETRY.bytes_per_block
        return ExtentRef("owner", slot * size, size, slot, self.owner.generations[slot])


class _NoModel:
    """A model for runners that only move blocks."""

    is_batch_invariant = True

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


def _write(cache: PagedKVCache, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    ops = TorchOps()
    ops.kv_write(key, value, step_of(ops, slots, slots, []), cache.pool, layer)


def _fill(cache: PagedKVCache, block: int) -> None:
    slots = torch.arange(block * 4, block * 4 + 4)
    for layer in range(2):
        content = torch.randn(2, 4, 2, 4)
        _write(cache, layer, content[0], content[1], slots)


def _map_command(owner: PagedKVCache) -> MapRegion:
    return MapRegion("owner", owner.region.num_bytes, NUM_BLOCKS, owner.generations_offset)


def _verifying(cache: PagedKVCache) -> ModelRunner:
    pytest.importorskip("xxhash", reason="engines that verify make xxh3 checksums")
    from tandem_engine.execution.block_checksums import BlockChecksums

    return ModelRunner(_NoModel(), TorchOps(), cache, BlockChecksums(cache))


@pytest.fixture
def pair() -> Pair:
    owner, pool = (PagedKVCache(GEOMETRY, NUM_BLOCKS, torch.device("cpu")) for _ in range(2))
    reader = ModelRunner(_NoModel(), TorchOps(), pool)
    fd = os.dup(owner.region.fd)
    reader.map_region(_map_command(owner), fd)
    os.close(fd)
    return Pair(owner, reader, pool)


def test_imported_blocks_are_the_owners_bit_for_bit(pair: Pair) -> None:
    _fill(pair.owner, 1)
    _fill(pair.owner, 4)
    copied = pair.reader.import_blocks([3, 0], [pair.extent(1), pair.extent(4)])
    assert copied == 2 * GEOMETRY.bytes_per_block
    assert pair.pool.read_block(3) == pair.owner.read_block(1) != bytes(GEOMETRY.bytes_per_block)
    assert pair.pool.read_block(0) == pair.owner.read_block(4)


def test_blocks_side_by_side_here_and_there_are_copied_as_well_as_scattered_ones(pair: Pair) -> None:
    for block in range(NUM_BLOCKS):
        _fill(pair.owner, block)
    here, there = [2, 3, 4, 0, 5, 1], [1, 2, 3, 4, 5, 0]
    assert pair.reader.import_blocks(here, [pair.extent(slot) for slot in there]) == 6 * GEOMETRY.bytes_per_block
    for block, slot in zip(here, there, strict=True):
        assert pair.pool.read_block(block) == pair.owner.read_block(slot)


def test_a_slot_handed_out_again_while_it_was_read_is_noticed(pair: Pair) -> None:
    extents = [pair.extent(1), pair.extent(2)]
    pair.owner.generations[2] += 1
    with pytest.raises(RegionError, match="slot 2 of region owner has generation 1 now, expected 0"):
        pair.reader.import_blocks([0, 1], extents)


def test_a_region_that_was_not_mapped_or_is_no_more_is_named(pair: Pair) -> None:
    extent = pair.extent(1)
    pair.reader.unmap_region("owner")
    pair.reader.unmap_region("never was")
    with pytest.raises(RegionError, match="region owner is not mapped"):
        pair.reader.import_blocks([0], [extent])


def test_an_extent_outside_its_region_is_refused(pair: Pair) -> None:
    size = GEOMETRY.bytes_per_block
    for extent in (
        ExtentRef("owner", NUM_BLOCKS * size + 4096, size, 0, 0),
        ExtentRef("owner", -size, size, 0, 0),
        ExtentRef("owner", 0, size, NUM_BLOCKS, 0),
    ):
        with pytest.raises(RegionError, match="outside region owner"):
            pair.reader.import_blocks([0], [extent])


def test_an_extent_of_another_size_is_refused(pair: Pair) -> None:
    with pytest.raises(RegionError, match="same layout"):
        pair.reader.import_blocks([0], [ExtentRef("owner", 0, 8, 0, 0)])


def test_a_region_its_owner_could_cut_off_is_refused(pair: Pair) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, pair.owner.region.num_bytes)
        with pytest.raises(RegionError, match="not sealed"):
            pair.reader.map_region(_map_command(pair.owner), fd)
    finally:
        os.close(fd)


def test_a_region_shorter_than_told_is_refused(pair: Pair) -> None:
    command = MapRegion("owner", pair.owner.region.num_bytes + 1, NUM_BLOCKS, pair.owner.generations_offset)
    with pytest.raises(RegionError, match="bytes long"):
        pair.reader.map_region(command, pair.owner.region.fd)


def test_what_was_mapped_stays_readable_when_its_owner_is_gone(pair: Pair) -> None:
    _fill(pair.owner, 1)
    expected, extent = pair.owner.read_block(1), pair.extent(1)
    pair.owner = pair.pool  # the last reference to the owner's pool, region and descriptor
    pair.reader.import_blocks([0], [extent])
    assert pair.pool.read_block(0) == expected


def test_the_region_cannot_be_resized() -> None:
    cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, torch.device("cpu"))
    with pytest.raises(PermissionError):
        os.ftruncate(cache.region.fd, 4096)


def test_staged_blocks_become_visible_when_they_are_copied_and_not_before() -> None:
    cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, torch.device("cpu"), is_private=True)
    memory = StagingMemory("staging", cache, Slots(2, GEOMETRY.bytes_per_block))
    for block in (2, 3, 5):
        _fill(cache, block)
    assert not memory.slots.rows.any()
    memory.start_copies([(2, 0), (3, 1)])
    assert memory.take_copied() == 2 and memory.take_copied() == 0
    assert [memory.slots.bytes_of(slot).tobytes() for slot in (0, 1)] == [cache.read_block(2), cache.read_block(3)]
    memory.start_copies([(5, 0)])
    assert memory.slots.bytes_of(0).tobytes() == cache.read_block(5)


def test_readers_of_a_staging_region_get_the_bytes_of_the_private_pool(pair: Pair) -> None:
    cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, torch.device("cpu"), is_private=True)
    slots = Slots(2, GEOMETRY.bytes_per_block)
    memory = StagingMemory("staging", cache, slots)
    _fill(cache, 4)
    slots.generations[1] += 1
    memory.start_copies([(4, 1)])
    fd = os.dup(slots.region.fd)
    pair.reader.map_region(MapRegion("staging", slots.region.num_bytes, 2, slots.generations_offset), fd)
    os.close(fd)
    size = GEOMETRY.bytes_per_block
    pair.reader.import_blocks([0], [ExtentRef("staging", size, size, 1, 1)])
    assert pair.pool.read_block(0) == cache.read_block(4)
    slots.generations[1] += 1
    with pytest.raises(RegionError, match="generation 2 now"):
        pair.reader.import_blocks([0], [ExtentRef("staging", size, size, 1, 1)])


def test_a_pool_is_block_major_with_layers_then_keys_transposed_and_values() -> None:
    cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, torch.device("cpu"))
    key, value = torch.full((1, 2, 4), 7.0), torch.full((1, 2, 4), 9.0)
    _write(cache, 1, key, value, torch.tensor([5 * 4 + 3]))
    block = np.frombuffer(cache.read_block(5), np.float32).reshape(2, 2, 2, 4, 4)  # layers, keys and values, heads
    assert (block[1, 0, :, :, 3] == 7).all() and (block[1, 1, :, 3] == 9).all() and block.sum() == (7 + 9) * 2 * 4
    assert GEOMETRY.layout().bytes_per_block == len(cache.read_block(5))


def test_a_flipped_bit_is_noticed_where_blocks_are_verified(pair: Pair) -> None:
    reader, writer = (_verifying(cache) for cache in (pair.pool, pair.owner))
    fd = os.dup(pair.owner.region.fd)
    reader.map_region(_map_command(pair.owner), fd)
    os.close(fd)
    _fill(pair.owner, 1)
    (checksum,) = writer.checksums([1])
    extent = replace(pair.extent(1), checksum=checksum)
    reader.import_blocks([0], [extent])
    pair.owner.region.bytes_at(pair.extent(1).offset, 8)[5] ^= 1
    with pytest.raises(CorruptBlock, match="slot 1 of region owner does not match its checksum"):
        reader.import_blocks([0], [extent])
    assert writer.checksums([1]) == [checksum], "a block that is sealed again keeps its first checksum"
    pair.reader.import_blocks([0], [extent])  # this one does not verify


def test_a_block_that_is_written_anew_gets_another_checksum(pair: Pair) -> None:
    writer = _verifying(pair.owner)
    _fill(pair.owner, 1)
    before = writer.checksums([1])
    pair.owner.generations[1] += 1
    _fill(pair.owner, 1)
    assert writer.checksums([1]) != before
    assert pair.reader.checksums([1]) == []


def test_a_slot_that_the_region_does_not_have_is_refused_wherever_it_stands(pair: Pair) -> None:
    beyond = replace(pair.extent(2), slot=NUM_BLOCKS)
    with pytest.raises(RegionError, match="not all in region owner with 6 slots"):
        pair.reader.import_blocks([0, 1], [pair.extent(1), beyond])
