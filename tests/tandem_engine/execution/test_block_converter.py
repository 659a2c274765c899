"""Tests that blocks of any layout become the pool's blocks, number for number, as a reference in numpy has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from tandem_engine.errors import CorruptBlock, RegionError
from tandem_engine.execution.block_converter import BlockConverter
from tandem_engine.execution.block_order import BlockShape
from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.execution.pool_views import views_of_layers
from tandem_engine.extents import BlockPart, ExtentRef
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import MapRegion
from tandem_engine.ops.torch_ops import TorchOps

TRANSPOSED = "layer,(key:head,dim,token|value:head,token,dim)"
PLAIN = "layer,kv,head,token,dim"
TOKEN_MAJOR = "layer,kv,token,head,dim"
VLLM = "layer,head,(key:dim,token|value:token,dim)"
"""Of vLLM's pool on a CPU."""
ORDERS = (TRANSPOSED, PLAIN, TOKEN_MAJOR, VLLM)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (8, 16, 32)
LAYERS, HEADS, DIM = 3, 2, 4
NUM_TOKENS = 75  # the last block is partly filled, whatever its size


class _NoModel:
    is_batch_invariant = True

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


@dataclass
class Pair:
    """A pool whose blocks have the layout of a writer, and a runner that has mapped its region."""

    source: PagedKVCache
    pool: PagedKVCache
    runner: ModelRunner

    @property
    def layout(self) -> SourceLayout:
        info = self.source.geometry.layout()
        return SourceLayout(info.tokens_per_block, info.dtype, info.order, info.bytes_per_block)

    def extent(self, slot: int, checksum: int = 0) -> ExtentRef:
        size = self.source.geometry.bytes_per_block
        return ExtentRef("source", slot * size, size, slot, self.source.generations[slot], checksum)


def geometry(dtype: torch.dtype, order: str, size: int) -> KVGeometry:
    return KVGeometry(LAYERS, HEADS, DIM, size, dtype, order)


def pair(source: KVGeometry, target: KVGeometry, *, verify: bool = False) -> Pair:
    cpu = torch.device("cpu")
    writer, pool = PagedKVCache(source, 12, cpu), PagedKVCache(target, 24, cpu)
    checksums = None
    if verify:
        pytest.importorskip("xxhash", reason="engines that verify make xxh3 checksums")
        from tandem_engine.execution.block_checksums import BlockChecksums

        checksums = BlockChecksums(pool)
    runner = ModelRunner(_NoModel(), TorchOps(), pool, checksums)
    fd = os.dup(writer.region.fd)
    runner.map_region(MapRegion("source", writer.region.num_bytes, 12, writer.generations_offset), fd)
    os.close(fd)
    return Pair(writer, pool, runner)


# ------------------------------------------------------------------------- the reference: numpy, written on its own


def to_bits(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float32 numbers to a dtype, to nearest even; return their bits."""
    if dtype == torch.float32:
        return numbers.view(np.uint32)
    if dtype == torch.float16:
        return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_numbers(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return as float32 what bits of a dtype say."""
    if dtype == torch.float32:
        return bits.view(np.float32)
    if dtype == torch.float16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_block(keys: np.ndarray, values: np.ndarray, order: str) -> np.ndarray:
    """Lay out one block of keys and values, [layers, tokens, heads, dim] each, as a flat array."""
    layers = []
    for key, value in zip(keys, values, strict=True):
        if order == TRANSPOSED:
            layers += [key.transpose(1, 2, 0).ravel(), value.transpose(1, 0, 2).ravel()]
        elif order == VLLM:
            for head in range(HEADS):
                layers += [key[:, head].T.ravel(), value[:, head].ravel()]
        elif order == PLAIN:
            layers += [key.transpose(1, 0, 2).ravel(), value.transpose(1, 0, 2).ravel()]
        else:
            layers += [key.ravel(), value.ravel()]
    return np.concatenate(layers)


def padded(numbers: np.ndarray, size: int, fill: float) -> np.ndarray:
    """Fill the last block of [layers, tokens, heads, dim] up with a number."""
    behind = -numbers.shape[1] % size
    return np.pad(numbers, ((0, 0), (0, behind), (0, 0), (0, 0)), constant_values=fill)


def write_source(cache: PagedKVCache, kv: np.ndarray, slots: Sequence[int]) -> None:
    """Write keys and values, [2, layers, tokens, heads, dim], into blocks, with NaN behind the tokens."""
    shape = cache.geometry
    keys, values = (padded(each, shape.block_size, np.nan) for each in kv)
    for number, slot in enumerate(slots):
        tokens = slice(number * shape.block_size, (number + 1) * shape.block_size)
        block = to_block(keys[:, tokens], values[:, tokens], shape.order)
        content = to_bits(np.ascontiguousarray(block), shape.dtype).view(np.uint8)
        cache.region.bytes_at(slot * shape.bytes_per_block, shape.bytes_per_block)[:] = content


def read_pool(cache: PagedKVCache, table: Sequence[int]) -> np.ndarray:
    """Return the bits of keys and values, [2, layers, tokens, heads, dim], of a block table."""
    shape = cache.geometry
    kind = np.uint32 if shape.dtype == torch.float32 else np.uint16
    blocks = []
    for block in table:
        numbers = np.frombuffer(cache.read_block(block), kind).reshape(LAYERS, 2, -1)
        if shape.order == TOKEN_MAJOR:
            keys, values = numbers.reshape(LAYERS, 2, shape.block_size, HEADS, DIM).transpose(1, 0, 2, 3, 4)
        elif shape.order == VLLM:
            of_heads = numbers.reshape(LAYERS, HEADS, 2, -1)
            keys = of_heads[:, :, 0].reshape(LAYERS, HEADS, DIM, shape.block_size).transpose(0, 3, 1, 2)
            values = of_heads[:, :, 1].reshape(LAYERS, HEADS, shape.block_size, DIM).transpose(0, 2, 1, 3)
        else:
            values = numbers[:, 1].reshape(LAYERS, HEADS, shape.block_size, DIM).transpose(0, 2, 1, 3)
            if shape.order == TRANSPOSED:
                keys = numbers[:, 0].reshape(LAYERS, HEADS, DIM, shape.block_size).transpose(0, 3, 1, 2)
            else:
                keys = numbers[:, 0].reshape(LAYERS, HEADS, shape.block_size, DIM).transpose(0, 2, 1, 3)
        blocks.append(np.stack([keys, values]))
    return np.concatenate(blocks, axis=2)


def parts_of(start: int, end: int, source_size: int, table: Sequence[int], size: int) -> list[list[BlockPart]]:
    """Return, for each source block from that of `start` on, the tokens of [start, end), one part per run of tokens."""
    parts: list[list[BlockPart]] = [[] for _ in range(start // source_size, -(-end // source_size))]
    for token in range(start, end):
        of_source = parts[token // source_size - start // source_size]
        block, place, source_place = table[token // size], token % size, token % source_size
        if of_source and of_source[-1].block == block:
            of_source[-1] = of_source[-1]._replace(num_tokens=of_source[-1].num_tokens + 1)
        else:
            of_source.append(BlockPart(block, place, source_place, 1))
    return parts


def some_kv(seed: int = 0) -> np.ndarray:
    """Return keys and values, [2, layers, tokens, heads, dim]: numbers of every size that float16 has."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((2, LAYERS, NUM_TOKENS, HEADS, DIM)) * np.exp2(random.integers(-14, 14))
    kv: np.ndarray = numbers.astype(np.float32)
    return kv


# ------------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize(("source_dtype", "dtype"), list(product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize(("source_order", "order"), list(product(ORDERS, ORDERS)))
def test_converted_blocks_are_those_of_the_reference(
    source_dtype: torch.dtype, dtype: torch.dtype, source_order: str, order: str
) -> None:
    for seed, (source_size, size) in enumerate(product(SIZES, SIZES)):
        here = pair(geometry(source_dtype, source_order, source_size), geometry(dtype, order, size))
        kv, random = some_kv(seed), np.random.default_rng(seed)
        slots = random.permutation(12)[: -(-NUM_TOKENS // source_size)].tolist()
        table = random.permutation(24)[: -(-NUM_TOKENS // size)].tolist()
        if seed % 2:  # as of an empty pool: many blocks are one copy
            slots, table = sorted(slots), sorted(table)
        write_source(here.source, kv, slots)
        stored = to_numbers(to_bits(kv, source_dtype), source_dtype)
        expected = to_bits(stored, dtype)
        for start in (0, 16, 37):
            here.pool.pool.rows.fill_(7)
            parts = parts_of(start, NUM_TOKENS, source_size, table, size)
            extents = [here.extent(slot) for slot in slots[start // source_size :]]
            num_bytes = here.runner.convert_blocks(parts, extents, here.layout)
            assert num_bytes == len(extents) * here.layout.bytes_per_block
            found = read_pool(here.pool, table)
            assert (found[:, :, start:NUM_TOKENS] == expected[:, :, start:]).all()
            untouched = to_bits(np.array([7], np.float32), dtype)
            assert (found[:, :, :start] == untouched).all(), "tokens that were here were written"
            assert (found[:, :, NUM_TOKENS:] == untouched).all(), "tokens behind the prompt were written"


@pytest.mark.parametrize(
    ("source_dtype", "source_order", "source_size"), [(torch.float32, TRANSPOSED, 16), (torch.bfloat16, VLLM, 32)]
)
def test_a_pool_with_one_tensor_per_layer_gets_what_one_with_all_layers_gets(
    source_dtype: torch.dtype, source_order: str, source_size: int
) -> None:
    here = pair(geometry(source_dtype, source_order, source_size), geometry(torch.float32, VLLM, 32))
    slots, table = list(range(-(-NUM_TOKENS // source_size))), [7, 2, 5]
    write_source(here.source, some_kv(), slots)
    parts = parts_of(16, NUM_TOKENS, source_size, table, 32)
    extents = [here.extent(slot) for slot in slots[16 // source_size :]]
    here.runner.convert_blocks(parts, extents, here.layout)
    layers = [torch.zeros(24, HEADS, 32, 2 * DIM) for _ in range(LAYERS)]  # as vLLM has them
    regions = MappedRegions()
    regions.map(
        MapRegion("source", here.source.region.num_bytes, 12, here.source.generations_offset), here.source.region.fd
    )
    converter = BlockConverter(views_of_layers(layers, VLLM, BlockShape(LAYERS, HEADS, 32, DIM)), regions)
    converter.write(converter.read(extents, here.layout), here.layout, parts)
    joined = torch.cat([layer.reshape(24, -1) for layer in layers], dim=1)
    assert torch.equal(joined, here.pool.pool.rows)
    assert joined[table].count_nonzero() > 0


def test_rounding_is_torchs_and_there_and_back_is_lossless_where_it_can_be() -> None:
    numbers = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.0e38, 1e-40, 0.0, -0.0, 65504.0])
    kv = np.resize(numbers.numpy(), (2, LAYERS, NUM_TOKENS, HEADS, DIM)).astype(np.float32)
    narrow, wide = geometry(torch.bfloat16, PLAIN, 16), geometry(torch.float32, TRANSPOSED, 16)
    table = list(range(5))
    parts = parts_of(0, NUM_TOKENS, 16, table, 16)
    there = pair(wide, narrow)
    write_source(there.source, kv, table)
    there.runner.convert_blocks(parts, [there.extent(slot) for slot in table], there.layout)
    rounded = torch.from_numpy(kv).to(torch.bfloat16)
    found = read_pool(there.pool, table)[:, :, :NUM_TOKENS]
    assert (found == rounded.view(torch.int16).numpy().view(np.uint16)).all()
    back = pair(narrow, wide)
    write_source(back.source, rounded.float().numpy(), table)
    back.runner.convert_blocks(parts, [back.extent(slot) for slot in table], back.layout)
    assert (read_pool(back.pool, table)[:, :, :NUM_TOKENS] == rounded.float().numpy().view(np.uint32)).all()


def test_bytes_are_checked_before_the_pool_is_written() -> None:
    xxhash = pytest.importorskip("xxhash")
    here = pair(geometry(torch.float32, PLAIN, 16), geometry(torch.bfloat16, PLAIN, 16), verify=True)
    write_source(here.source, some_kv(), range(5))
    (part,) = parts_of(0, 16, 16, [3], 16)
    right = here.extent(2, xxhash.xxh3_64_intdigest(here.source.read_block(2)))
    here.runner.convert_blocks([part], [right], here.layout)
    before = here.pool.read_block(3)
    here.source.region.bytes_at(right.offset, 8)[5] ^= 1
    with pytest.raises(CorruptBlock, match="slot 2 of region source does not match its checksum"):
        here.runner.convert_blocks([part], [right], here.layout)
    stale = here.extent(1)
    here.source.generations[1] += 1
    with pytest.raises(RegionError, match="slot 1 of region source has generation 1 now, expected 0"):
        here.runner.convert_blocks([part], [stale], here.layout)
    assert here.pool.read_block(3) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8_e4m3"}, "KV blocks in float8_e4m3 cannot be converted"),
        ({"order": "layer,kv,head,dim"}, "'layer,kv,head,dim' is no order of layer, kv, head, token and dim"),
        ({"order": "layer,(key:head,dim,token|other:head,token,dim)"}, "is no order of"),
        ({"tokens_per_block": 8}, "a block of 8 tokens in float32 has 1536"),
        ({"dtype": "bfloat16"}, "a block of 16 tokens in bfloat16 has 1536"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(changes: dict[str, str | int], message: str) -> None:
    here = pair(geometry(torch.float32, PLAIN, 16), geometry(torch.bfloat16, PLAIN, 16))
    values = {name: getattr(here.layout, name) for name in here.layout.__struct_fields__} | changes
    (part,) = parts_of(0, 16, 16, [3], 16)
    with pytest.raises(RegionError) as raised:
        here.runner.convert_blocks([part], [here.extent(0)], SourceLayout(**values))
    assert message in str(raised.value)
    assert here.pool.read_block(3) == bytes(here.pool.geometry.bytes_per_block)


def test_numbers_beyond_float16_are_refused() -> None:
    here = pair(geometry(torch.float32, PLAIN, 16), geometry(torch.float16, PLAIN, 16))
    kv = some_kv()
    kv[1, 2, 9, 1, 3] = 70_000
    write_source(here.source, kv, range(5))
    (part,) = parts_of(0, 16, 16, [3], 16)
    with pytest.raises(RegionError, match="float32 have numbers beyond the range of float16"):
        here.runner.convert_blocks([part], [here.extent(0)], here.layout)
