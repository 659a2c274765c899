"""Checks that the machine has memory for all workers of a measurement at once."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

KV_BYTES_PER_WORKER = 256 << 20
"""Enough for the largest workload; the share that `tandem up` takes by itself is meant for one Tandem per machine."""

_PROCESS_BYTES = 500 << 20
_MAX_SHARE_OF_AVAILABLE = 0.5
"""The rest stays for others: the kernel's choice of whom to kill when memory runs out may well fall on them."""


def needed_bytes(weight_bytes: int, num_workers: int) -> int:
    """Return an estimate: weights of two bytes per number become four, with some room while they load."""
    return num_workers * (int(weight_bytes * 2.3) + KV_BYTES_PER_WORKER + _PROCESS_BYTES)


def check_memory(model: Path, num_workers: int) -> None:
    """Raise RuntimeError before anything starts, if it would take more than half of what is available now."""
    needed = needed_bytes(sum(file.stat().st_size for file in model.glob("*.safetensors")), num_workers)
    available = psutil.virtual_memory().available
    if needed > available * _MAX_SHARE_OF_AVAILABLE:
        raise RuntimeError(
            f"{num_workers} workers with {model.name} need about {needed / 2**30:.1f} GiB; of the "
            f"{available / 2**30:.1f} GiB available, half is left to others; measure a smaller model, or when the "
            "machine is free"
        )


def kv_bytes_per_token(model: Path) -> int:
    """Return the bytes that the keys and values of one token take, float32."""
    config = json.loads((model / "config.json").read_text())
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4)
