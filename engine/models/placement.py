"""On which device, with which number format, does a model run?"""

from __future__ import annotations

from typing import Any

import torch

from engine.models.checkpoint import ModelUnusable
from engine.settings import Device, DtypeChoice


def choose_device(device: Device) -> torch.device:
    """Return the device; raises ModelUnusable for CUDA where there is none."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelUnusable("--device cuda, but torch finds no CUDA device; install a CUDA build, or take --device cpu")
    return torch.device("cuda" if device != "cpu" and has_cuda else "cpu")


def choose_dtype(choice: DtypeChoice, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV.

    A CPU computes in float32 whatever the checkpoint's format: without bf16 instructions bf16 products are five times
    slower (measured), and with them they round by batch shape, so that a token would depend on its neighbours (law 3).
    """
    if choice != "auto":
        dtype: torch.dtype = getattr(torch, choice)
        return dtype
    if device.type == "cpu":
        return torch.float32
    of_checkpoint: torch.dtype | None = getattr(config, "dtype", None)
    return of_checkpoint or torch.float32


def numerics_class(device: torch.device, dtype: torch.dtype, model_type: str) -> str:
    """Return the name of all that decides how numbers round: equal names promise equal tokens (law 3)."""
    where = device.type
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"cuda-sm{major}{minor}"
    version = torch.__version__.split("+")[0]
    return f"torch-{version}/{where}/{str(dtype).removeprefix('torch.')}/{model_type}/tp1/eager"
