"""Chooses the number of KV blocks of the pool."""

from __future__ import annotations

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.device_memory import device_pool_bytes, read_device_memory, step_bytes
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.settings import EngineConfig
from tandem_machine.memory import usable_memory
from tandem_machine.nodes import available_bytes_of

_CPU_SHARE = 0.2
_NODE_SHARE = 0.6
"""Of the memory of one NUMA node, at most: a larger pool would spill to other nodes."""
_MOST_PER_WEIGHT_BYTE = 3
"""Bytes of KV for a byte of weights, at most: a small model's pool is small, however large the machine."""
_LEAST_BYTES = 32 << 20
"""Of a pool that `_MOST_PER_WEIGHT_BYTE` limits."""


def choose_num_blocks(
    config: EngineConfig,
    geometry: KVGeometry,
    context_length: int,
    device: torch.device,
    mapped_bytes: int = 0,
    draft_bytes_per_block: int = 0,
    weight_bytes: int = 0,
    numa_node: int | None = None,
    vocab_size: int = 0,
) -> int:
    """Return the pool's size: as configured in blocks or in bytes, or by free memory after the weights are loaded.

    A block belongs to one group of layers; a number of blocks in the configuration is per group. A size from free
    memory never exceeds the need of a full batch of longest requests. On a CPU it does not exceed three times
    `weight_bytes` (0: not known) either, unless one longest request needs more; a device is there for its workers, and
    `device_memory_share` of it is this worker's. `mapped_bytes` of weights are in mapped files, whose memory the system
    reports as free. A draft model's blocks have the same ids and share the memory. With `numa_node`, all of them come
    from the memory of this node as long as it has any. Raises ModelUnusable if no block fits.
    """
    bytes_per_block = geometry.bytes_per_block + draft_bytes_per_block
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * geometry.num_groups
    if config.kv_memory_bytes is not None:
        return _fitting(config.kv_memory_bytes, bytes_per_block)
    longest = -(-context_length // geometry.block_size) * geometry.num_groups
    if device.type == "cuda":
        num_step_bytes = step_bytes(
            geometry, context_length, config.max_num_batched_tokens, config.max_num_seqs, vocab_size
        )
        memory = read_device_memory(device)
        limits = [device_pool_bytes(memory, config.device_memory_share, num_step_bytes, bytes_per_block)]
    else:
        limits = [_free_for_kv(mapped_bytes, numa_node)]
    if config.kv_memory_limit_bytes is not None:
        limits.append(config.kv_memory_limit_bytes)
    if weight_bytes and device.type != "cuda":
        limits.append(max(_LEAST_BYTES, _MOST_PER_WEIGHT_BYTE * weight_bytes, longest * bytes_per_block))
    return min(config.max_num_seqs * longest, _fitting(min(limits), bytes_per_block))


def _fitting(num_bytes: int, bytes_per_block: int) -> int:
    num_blocks = num_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelUnusable(
            f"{num_bytes:,} bytes for KV do not hold one block of {bytes_per_block:,}; "
            "give more with --kv-memory-bytes, or serve a smaller model"
        )
    return num_blocks


def _free_for_kv(mapped_bytes: int, numa_node: int | None) -> int:
    num_bytes = _CPU_SHARE * max(0, usable_memory().available_bytes - mapped_bytes)
    if numa_node is not None:
        num_bytes = min(num_bytes, _NODE_SHARE * max(0, available_bytes_of(numa_node) - mapped_bytes))
    return int(num_bytes)
