"""Chooses a model's device, dtype and route."""

from __future__ import annotations

import logging
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.registry import FAMILIES, find_family
from tandem_engine.ops.base import Ops
from tandem_engine.scheduling.numerics import BATCH_DEPENDENT, gives_equal_bits
from tandem_engine.settings import DtypeChoice, Route

log = logging.getLogger(__name__)
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_device(device: str) -> torch.device:
    """Return the device of auto, cpu, cuda or cuda:N, and make a CUDA device this process's default.

    CUDA devices are counted in the order of nvidia-smi, unless CUDA_DEVICE_ORDER says otherwise. The log has why auto
    takes the CPU of a machine with NVIDIA cards. Raises ModelUnusable for CUDA without that device.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if device == "cpu":
        return torch.device("cpu")
    why_not = _why_no_cuda()
    if device == "auto" and why_not:
        if has_nvidia_cards():
            log.warning("serving on the CPU, though this machine has NVIDIA cards: %s", why_not)
        return torch.device("cpu")
    if why_not:
        raise ModelUnusable(f"--device {device}, but {why_not}; or take --device cpu")
    index, num_devices = torch.device("cuda" if device == "auto" else device).index or 0, torch.cuda.device_count()
    if index >= num_devices:
        raise ModelUnusable(f"--device {device}, but torch finds {num_devices} CUDA devices; the first is cuda:0")
    chosen = torch.device("cuda", index)
    torch.cuda.set_device(chosen)  # streams, pinned memory and libraries that name no device take this one
    return chosen


def has_nvidia_cards() -> bool:
    """Return whether the NVIDIA driver of this machine has cards."""
    return _DRIVER_GPUS.is_dir() and any(_DRIVER_GPUS.iterdir())


def _why_no_cuda() -> str | None:
    """Return why torch cannot use a CUDA device, with the remedy; None: it can."""
    with warnings.catch_warnings(record=True) as caught:  # is_available warns of a driver that is too old
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        why = "; ".join(str(each.message) for each in caught) or "it sees no device; look at CUDA_VISIBLE_DEVICES"
    except (RuntimeError, AssertionError) as error:
        why = str(error)
    first_sentences = " ".join(why.split())[:400]
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use a CUDA device: {first_sentences} "
        "(a newer driver, or a torch of an older CUDA, helps where the driver is too old)"
    )


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
        where = cuda_name(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
        if gives_equal_bits(route):  # no route is invariant there: cuBLAS chooses kernels by the shape of a batch
            route = f"{route}-{BATCH_DEPENDENT}"
    elif with_capability:
        where = f"{where}-{torch.backends.cpu.get_cpu_capability().lower()}"
    version = torch.__version__.split("+")[0]
    return f"torch-{version}/{where}/{ops.name}/{str(dtype).removeprefix('torch.')}/{model_type}/tp1/{route}"


def cuda_name(capability: tuple[int, int], card: str) -> str:
    """Return the name of a kind of card: ((9, 0), "NVIDIA H100 PCIe") is "cuda-sm90-h100-pcie".

    The card counts, not its capability alone: libraries choose kernels by the number of its multiprocessors and by its
    memory, and a MIG instance has fewer.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-").removeprefix("nvidia-")
    return f"cuda-sm{capability[0]}{capability[1]}-{slug}"
