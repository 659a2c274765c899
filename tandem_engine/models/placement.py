"""Chooses a model's device, dtype and route."""

from __future__ import annotations

from typing import Any

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.registry import FAMILIES, find_family
from tandem_engine.ops.base import Ops
from tandem_engine.settings import Device, DtypeChoice, Route


def choose_device(device: Device) -> torch.device:
    """Return the device; raises ModelUnusable for CUDA without a CUDA device."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelUnusable("--device cuda, but torch finds no CUDA device; install a CUDA build, or take --device cpu")
    return torch.device("cuda" if device != "cpu" and has_cuda else "cpu")


def choose_route(choice: Route, config: Any, device: torch.device, dtype: torch.dtype) -> Family | None:
    """Return the family of the lean route, None for the compatibility route.

    Raises ModelUnusable if `choice` is "lean" and the lean route cannot serve the model.
    """
    family = find_family(config)
    if choice == "lean":
        if family is None:
            raise ModelUnusable(
                f"the lean route serves {', '.join(sorted(FAMILIES))}, not {config.model_type}; take auto"
            )
        if dtype != torch.float32 or device.type != "cpu":
            raise ModelUnusable(f"the lean route computes in float32 on a CPU, not in {dtype} on {device}; take auto")
    is_for_us = choice != "transformers" and device.type == "cpu" and dtype == torch.float32
    return family if is_for_us else None


def choose_dtype(choice: DtypeChoice, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV.

    A CPU computes in float32 whatever the checkpoint's format. Without bf16 instructions torch's bf16 products are five
    times slower (measured). With them they round by batch shape, so that a token's bits would depend on the other
    requests (law 3). Weights keep the checkpoint's format in memory and are widened as they are used.
    """
    if choice != "auto":
        dtype: torch.dtype = getattr(torch, choice)
        return dtype
    if device.type == "cpu":
        return torch.float32
    of_checkpoint: torch.dtype | None = getattr(config, "dtype", None)
    return of_checkpoint or torch.float32


def numerics_class(ops: Ops, route: str, device: torch.device, dtype: torch.dtype, model_type: str) -> str:
    """Return the name of everything that decides how numbers round: equal names mean equal tokens (law 3).

    Names that contain "batch-dependent" are the exception.
    """
    where = device.type
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"cuda-sm{major}{minor}"
    version = torch.__version__.split("+")[0]
    return f"torch-{version}/{where}/{ops.name}/{str(dtype).removeprefix('torch.')}/{model_type}/tp1/{route}"
