"""Divides the memory of a device between weights, the work of a step, and the KV pool.

    |<----------------------------------- total ----------------------------------->|
    |<------------------- share ------------------->|  other processes, other shares |
    | context | weights, trial forward | step | pool |

The size of the pool depends on the process's own figures, not on what others have taken so far: workers that start on a
card at the same time get equal pools. What is free is a limit beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.ops.sdpa_plan import MAX_GATHERED_TOKENS

_CONTEXT_BYTES = 768 << 20
"""Of a CUDA context and the libraries' workspaces, which torch does not count."""
_LEFT_FREE_BYTES = 256 << 20
"""Of what is free, for fragments and for what others take while a worker starts."""
_COPIES_OF_KEYS = 2
"""Of one layer's keys and values during attention: those that were gathered, and those of the call before."""
_BYTES_PER_MASKED = 3
"""Of a token and a key in a mask: a bool, and SDPA's bias in bf16."""
_COPIES_OF_LOGITS = 3
"""As the model returns them, as float32, and those that go to the host."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, after the weights were loaded and the largest forward was tried."""

    name: str
    """For people: "cuda:0 (NVIDIA H200)"."""
    total_bytes: int
    free_bytes: int
    """What no process holds."""
    tensor_bytes: int
    """Tensors of this process."""
    peak_bytes: int
    """The most that its tensors have taken."""


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a CUDA device; gives cached memory back to the device before."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        f"{device} ({torch.cuda.get_device_name(device)})",
        total_bytes,
        free_bytes,
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
    )


def step_bytes(
    geometry: KVGeometry, context_length: int, max_num_batched_tokens: int, max_num_seqs: int, vocab_size: int
) -> int:
    """Return the memory that a step takes beside the forward that was tried: attention to the pool, and sampling."""
    bytes_per_token = geometry.bytes_per_block // (geometry.block_size * geometry.layers_per_block)
    num_keys = max(context_length, MAX_GATHERED_TOKENS)
    attention = num_keys * (_COPIES_OF_KEYS * bytes_per_token + _BYTES_PER_MASKED * max_num_batched_tokens)
    return attention + _COPIES_OF_LOGITS * 4 * max_num_seqs * vocab_size


def device_pool_bytes(memory: DeviceMemory, share: float, num_step_bytes: int, bytes_per_block: int) -> int:
    """Return the size of the pool. Raises ModelUnusable if no block fits, with all sizes and the remedy."""
    num_own_bytes = _CONTEXT_BYTES + memory.peak_bytes + num_step_bytes
    by_share = int(share * memory.total_bytes) - num_own_bytes
    num_later_bytes = memory.peak_bytes - memory.tensor_bytes + num_step_bytes
    by_free = memory.free_bytes - num_later_bytes - _LEFT_FREE_BYTES
    if by_share < bytes_per_block:
        raise ModelUnusable(
            f"{memory.name} has {_gb(memory.total_bytes)}, and {share:g} of it is {_gb(share * memory.total_bytes)}, "
            f"but weights and working memory of this worker take {_gb(num_own_bytes)}: no block of KV fits; raise "
            "--device-memory-share, start fewer workers on the card, or serve a smaller model"
        )
    if by_free < bytes_per_block:
        raise ModelUnusable(
            f"{memory.name} has {_gb(memory.free_bytes)} free beside the weights, but a step takes "
            f"{_gb(num_later_bytes + _LEFT_FREE_BYTES)}: no block of KV fits; end other processes on the card, or take "
            "another with --device cuda:N"
        )
    return min(by_share, by_free)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
