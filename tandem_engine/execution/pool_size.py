"""Chooses the number of KV blocks of the pool."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.settings import EngineConfig

_CPU_MOST_BYTES = 2 << 30
_CPU_SHARE = 0.2
_CUDA_SHARE = 0.9
_CGROUP = Path("/sys/fs/cgroup")


def choose_num_blocks(
    config: EngineConfig,
    geometry: KVGeometry,
    context_length: int,
    device: torch.device,
    mapped_bytes: int = 0,
    draft_bytes_per_block: int = 0,
) -> int:
    """Return the pool's size: as configured in blocks or in bytes, or by free memory after the weights are loaded.

    A block belongs to one group of layers; a number of blocks in the configuration is per group. A size from free
    memory never exceeds the need of a full batch of longest requests. `mapped_bytes` of weights are in mapped files,
    whose memory the system reports as free. A draft model's blocks have the same ids and share the memory. Raises
    ModelUnusable if no block fits.
    """
    bytes_per_block = geometry.bytes_per_block + draft_bytes_per_block
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * geometry.num_groups
    if config.kv_memory_bytes is not None:
        return _fitting(config.kv_memory_bytes, bytes_per_block)
    most_useful = config.max_num_seqs * -(-context_length // geometry.block_size) * geometry.num_groups
    limit_bytes = config.kv_memory_limit_bytes
    free_bytes = _free_for_kv(device, mapped_bytes)
    return min(most_useful, _fitting(min(free_bytes, limit_bytes or free_bytes), bytes_per_block))


def _fitting(num_bytes: int, bytes_per_block: int) -> int:
    num_blocks = num_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelUnusable(
            f"{num_bytes:,} bytes for KV do not hold one block of {bytes_per_block:,}; "
            "give more with --kv-memory-bytes, or serve a smaller model"
        )
    return num_blocks


def _free_for_kv(device: torch.device, mapped_bytes: int) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(_CUDA_SHARE * free)
    return min(_CPU_MOST_BYTES, int(_CPU_SHARE * max(0, free_host_bytes() - mapped_bytes)))


def free_host_bytes() -> int:
    """Return the memory that this process may still use: the machine's, or the rest of its cgroups if that is less."""
    return max(0, min([_available_bytes(), *_cgroup_rests()]))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no line MemAvailable; give --kv-memory-bytes")


def _cgroup_rests() -> list[int]:
    """Return limit minus use, without cached files, of each cgroup (v2) of this process that has a limit."""
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
    group = _CGROUP / own.lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(_CGROUP)]
    return [rest for folder in folders if (rest := _rest(folder)) is not None]


def _rest(folder: Path) -> int | None:
    limit = folder / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    cached = sum(
        int(line.split()[1])
        for line in (folder / "memory.stat").read_text().splitlines()
        if line.startswith("inactive_file ")
    )
    return int(limit.read_text()) - int((folder / "memory.current").read_text()) + cached
