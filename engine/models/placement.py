"""On which device, with which number format, does a model run?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoint import ModelUnusable
from engine.settings import Device, DtypeChoice

_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}


def choose_device(device: Device) -> torch.device:
    """Return the device; raises ModelUnusable for CUDA where there is none."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelUnusable("--device cuda, but torch finds no CUDA device; install a CUDA build, or take --device cpu")
    return torch.device("cuda" if device != "cpu" and has_cuda else "cpu")


def choose_dtype(choice: DtypeChoice, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV.

    Without bf16 instructions torch's bf16 matrix products are five times slower than float32 (measured), so a CPU that
    lacks them computes in float32, whatever the checkpoint's format.
    """
    if choice != "auto":
        dtype: torch.dtype = getattr(torch, choice)
        return dtype
    of_checkpoint: torch.dtype = getattr(config, "dtype", None) or torch.float32
    if device.type == "cuda":
        return of_checkpoint
    return torch.bfloat16 if of_checkpoint is torch.bfloat16 and _has_bf16_instructions() else torch.float32


def numerics_class(device: torch.device, dtype: torch.dtype, model_type: str) -> str:
    """Return the name of all that decides how numbers round: equal names promise equal tokens (law 3)."""
    where = device.type
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"cuda-sm{major}{minor}"
    version = torch.__version__.split("+")[0]
    return f"torch-{version}/{where}/{str(dtype).removeprefix('torch.')}/{model_type}/tp1/eager"


def _has_bf16_instructions() -> bool:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return False
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return bool(_BF16_FLAGS & set(flags.split()))
