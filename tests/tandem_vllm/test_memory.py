"""Tests that blocks of other layouts get into a pool with one tensor per layer, as vLLM has it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.execution.block_order import BlockShape, keys_and_values
from tandem_engine.execution.kv_cache import Slots
from tandem_engine.extents import BlockPart, ExtentRef
from tandem_engine.layout import LayoutInfo, SourceLayout
from tandem_engine.messages import MapRegion
from tandem_vllm.memory import BlockMemory

LAYERS, HEADS, DIM = 2, 2, 4
OURS = SourceLayout(
    16, "bfloat16", "layer,(key:head,dim,token|value:head,token,dim)", 2 * LAYERS * HEADS * 16 * DIM * 2
)
VLLM = "layer,head,(key:dim,token|value:token,dim)"


def layout(order: str = VLLM) -> LayoutInfo:
    return LayoutInfo(LAYERS, 32, HEADS, DIM, DIM, "float32", order, 2 * LAYERS * HEADS * 32 * DIM * 4)


def memory_of(layers: list[torch.Tensor], info: LayoutInfo) -> BlockMemory:
    return BlockMemory("mine", layers, Slots(2, info.bytes_per_block), info)


def lend(memory: BlockMemory, num_blocks: int) -> tuple[Slots, torch.Tensor]:
    """Map a region of random blocks of `OURS`; returns it and its numbers, [num_blocks, elements]."""
    slots = Slots(num_blocks, OURS.bytes_per_block)
    numbers = torch.randn(num_blocks, OURS.bytes_per_block // 2, generator=torch.Generator().manual_seed(1))
    rows = slots.rows.view(torch.bfloat16)
    rows.copy_(numbers)
    fd = os.dup(slots.fds[0])
    memory.map_region(MapRegion("theirs", slots.num_bytes, num_blocks, slots.generations_offset), fd)
    os.close(fd)
    return slots, rows.clone()


def extent(slots: Slots, slot: int, checksum: int = 0) -> ExtentRef:
    size = slots.bytes_per_slot
    return ExtentRef("theirs", slot * size, size, slot, slots.generations[slot], checksum)


def test_two_blocks_of_16_tokens_are_one_of_32_in_every_layer() -> None:
    layers = [torch.zeros(3, HEADS, 32, 2 * DIM) for _ in range(LAYERS)]
    memory = memory_of(layers, layout())
    slots, numbers = lend(memory, 2)
    parts = [[BlockPart(2, 0, 0, 16)], [BlockPart(2, 16, 0, 10)]]  # the second one is partly filled
    assert memory.convert_blocks(parts, [extent(slots, 0), extent(slots, 1)], OURS) == 2 * OURS.bytes_per_block
    theirs = keys_and_values(numbers.float(), OURS.order, BlockShape(LAYERS, HEADS, 16, DIM))
    for number, layer in enumerate(layers):
        mine = keys_and_values(layer.view(3, -1), VLLM, BlockShape(1, HEADS, 32, DIM))
        for here, there in zip(mine, theirs, strict=True):  # [blocks, layers, heads, tokens, dim]
            assert torch.equal(here[2, 0, :, :16], there[0, number])
            assert torch.equal(here[2, 0, :, 16:26], there[1, number, :, :10])
            assert not here[2, 0, :, 26:].any() and not here[:2].any()


def test_a_slot_that_was_given_away_is_refused() -> None:
    layers = [torch.zeros(3, HEADS, 32, 2 * DIM) for _ in range(LAYERS)]
    memory = memory_of(layers, layout())
    slots, _ = lend(memory, 1)
    stale = extent(slots, 0)
    slots.generations[0] += 1
    with pytest.raises(RegionError, match="slot 0 of region theirs has generation 1 now, expected 0"):
        memory.convert_blocks([[BlockPart(1, 0, 0, 16)]], [stale], OURS)
    assert not any(layer.any() for layer in layers)


def test_bytes_that_do_not_match_their_checksum_are_refused() -> None:
    pytest.importorskip("xxhash", reason="engines that verify make xxh3 checksums")
    from tandem_engine.execution.block_checksums import BlockChecksums

    info = layout()
    layers, own = [torch.zeros(3, HEADS, 32, 2 * DIM) for _ in range(LAYERS)], Slots(2, info.bytes_per_block)
    memory = BlockMemory("mine", layers, own, info)
    checked: Any = memory
    memory.checksums_of = BlockChecksums(checked, own)
    slots, _ = lend(memory, 1)
    with pytest.raises(CorruptBlock, match="slot 0 of region theirs does not match its checksum"):
        memory.convert_blocks([[BlockPart(1, 0, 0, 16)]], [extent(slots, 0, checksum=1)], OURS)
    assert not any(layer.any() for layer in layers)


def test_an_order_of_vllm_alone_converts_nothing_and_names_the_remedy() -> None:
    layers = [torch.zeros(3, HEADS, 32, 2 * DIM) for _ in range(LAYERS)]
    memory = memory_of(layers, layout("vllm-LBHNC-amx"))
    slots, _ = lend(memory, 1)
    with pytest.raises(RegionError, match=r'the order vllm-LBHNC-amx: .* exactness "class"'):
        memory.convert_blocks([[BlockPart(1, 0, 0, 16)]], [extent(slots, 0)], OURS)
    assert not any(layer.any() for layer in layers)
