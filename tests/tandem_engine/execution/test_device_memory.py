"""A card's memory is divided by shares, whoever starts first; what others hold is respected."""

from __future__ import annotations

import pytest
import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.device_memory import DeviceMemory, device_pool_bytes, step_bytes
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.settings import EngineConfig

GB = 10**9
H200 = "cuda:0 (NVIDIA H200)"
LLAMA_8B = KVGeometry(32, 8, 128, 16, torch.bfloat16)
STEP = step_bytes(LLAMA_8B, context_length=131_072, max_num_batched_tokens=512, max_num_seqs=64, vocab_size=128_256)


def _pool(share: float, free_gb: float, tensor_gb: float = 16.1, peak_gb: float = 16.5) -> int:
    memory = DeviceMemory(H200, 141 * GB, int(free_gb * GB), int(tensor_gb * GB), int(peak_gb * GB))
    return device_pool_bytes(memory, share, STEP, LLAMA_8B.bytes_per_block)


def test_a_lone_worker_takes_most_of_its_card() -> None:
    pool = _pool(0.9, free_gb=124)
    assert 105 * GB < pool < 0.9 * 141 * GB - 16.5 * GB
    assert pool // LLAMA_8B.bytes_per_block * 16 > 800_000, "tokens"


def test_two_workers_on_a_card_get_equal_pools_whoever_starts_first() -> None:
    first = _pool(0.45, free_gb=124)
    second = _pool(0.45, free_gb=124 - 17 - first / GB)
    assert first == second
    assert 2 * (first + 16.5 * GB) < 0.9 * 141 * GB


def test_what_others_hold_is_not_taken() -> None:
    assert _pool(0.9, free_gb=20) < 20 * GB
    with pytest.raises(ModelUnusable, match=r"cuda:0 \(NVIDIA H200\) has 1.0 GB free .* end other processes"):
        _pool(0.9, free_gb=1)


def test_a_share_that_the_weights_fill_is_refused_with_all_sizes() -> None:
    message = r"cuda:0 \(NVIDIA H200\) has 141.0 GB, and 0.1 of it is 14.1 GB, .* take 1\d.\d GB.*--device-memory-share"
    with pytest.raises(ModelUnusable, match=message):
        _pool(0.1, free_gb=124)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(ValueError, match=r"device_memory_share is .*, must be above 0 and at most 1"):
        EngineConfig("m", device_memory_share=share)
