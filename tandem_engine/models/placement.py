"""Chooses a model's device, dtype and route."""

from __future__ import annotations

import platform
from typing import Any

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.registry import FAMILIES, find_family
from tandem_engine.ops.base import Ops
from tandem_engine.settings import DtypeChoice, Route


def choose_device(device: str) -> torch.device:
    """Return the device of auto, cpu, cuda or cuda:N; raises ModelUnusable for CUDA without that device."""
    has_cuda = torch.cuda.is_available()
    if device.startswith("cuda") and not has_cuda:
        raise ModelUnusable(
            f"--device {device}, but torch finds no CUDA device; install a CUDA build, or take --device cpu"
        )
    if device == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    chosen, num_devices = torch.device(device), torch.cuda.device_count()
    if chosen.index is not None and chosen.index >= num_devices:
        raise ModelUnusable(f"--device {device}, but torch finds {num_devices} CUDA devices; the first is cuda:0")
    return chosen


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


def numerics_class(
    ops: Ops, route: str, device: torch.device, dtype: torch.dtype, model_type: str, *, with_capability: bool
) -> str:
    """Return the name of everything that decides how numbers round: equal names mean equal tokens (law 3).

    `with_capability` is for models of which torch computes a part on CPUs: its exp differs between AVX2 and AVX-512.
    Names that contain "batch-dependent" are the exception.
    """
    where = device.type
    if device.type == "cpu" and platform.machine() != "x86_64":
        # The kernels' bits are the same on arm64. Torch's cosines and sines, and so the rotary tables, are not.
        where = f"cpu-{platform.machine()}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"cuda-sm{major}{minor}"
    elif with_capability:
        where = f"{where}-{torch.backends.cpu.get_cpu_capability().lower()}"
    version = torch.__version__.split("+")[0]
    return f"torch-{version}/{where}/{ops.name}/{str(dtype).removeprefix('torch.')}/{model_type}/tp1/{route}"
