"""Describes a card, and measures what it can do: bytes and operations per second, launches, copies to and from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kit.form import Form
from benchmarks.gpu_kit.part import Figures

_NUM_REPEATS = 5
_PACKAGES = ("torch", "transformers", "numpy", "nvidia-ml-py")


class NoCard(Exception):
    """There is no card that torch can use; the message is the reason and the remedy."""


def card(device: str) -> Figures:
    """Describe the card, its driver and the software; raises NoCard."""
    found: Figures = {"packages": {name: version(name) for name in _PACKAGES}, "torch_cuda": torch.version.cuda}
    if device == "cpu":
        return {**found, "name": "CPU"}
    if reason := why_no_card():
        raise NoCard(reason)
    facts = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        **found,
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "num_multiprocessors": facts.multi_processor_count,
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        **_by_nvml(str(facts.uuid)),
    }


def why_no_card() -> str:
    """Return why torch has no card, and the remedy; "" if it has one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; install one with it (`make gpu-kit` takes the package "
            "index's), or give --device cpu to try the kit itself"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no card: {error}"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no card; does nvidia-smi list one?"


def _by_nvml(uuid: str) -> Figures:
    """Return what NVML knows of the card; a reading that fails is named instead."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the library raises errors of many classes
        return {"nvml": f"{type(error).__name__}: {error}"}

    def handle() -> Any:
        """Return the card; an instance of MIG has another kind of name, and its readings name the error."""
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    readings: dict[str, Callable[[], Any]] = {
        "driver": nvml.nvmlSystemGetDriverVersion,
        "pcie_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle()),
        "pcie_width": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle()),
        "power_limit_milliwatts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle()),
        "mig_mode": lambda: nvml.nvmlDeviceGetMigMode(handle())[0],
        "num_processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle())),
    }
    values: Figures = {}
    for name, read in readings.items():
        try:
            values[name] = read()
        except nvml.NVMLError as error:
            values[name] = f"{type(error).__name__}: {error}"
    return values


def process_memory(device: str) -> Figures:
    """Return what NVML and torch count for this process; NVML has CUDA's context too. None: it lists other pids."""
    if device == "cpu":
        return {}
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(card)
    except nvml.NVMLError as error:
        return {"nvml": f"{type(error).__name__}: {error}"}
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return {"nvml_bytes": own[0] if own else None, "torch_reserved_bytes": torch.cuda.memory_reserved(device)}


def limits(device: str, form: Form) -> Figures:
    """Measure the best of a few repeats each."""
    target = torch.device(device)
    return {
        **_memory(target, form.copy_mib << 20),
        **_matmul(target, form.matmul_size),
        **_launches(target, form.num_launches),
        **_transfers(target, form.copy_mib << 20),
    }


def _memory(device: torch.device, num_bytes: int) -> Figures:
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = _best(device, lambda: target.copy_(source))
    read = _best(device, lambda: source.sum())
    return {
        "memory_copy_gb_per_second": 2 * num_bytes / copied / 1e9,
        "memory_read_gb_per_second": num_bytes / read / 1e9,
    }


def _matmul(device: torch.device, size: int) -> Figures:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.ones(size, size, device=device, dtype=dtype)
        out = torch.empty_like(left)
        seconds = _best(device, partial(torch.mm, left, left, out=out))
        name = str(dtype).removeprefix("torch.")
        found[f"matmul_tflops_{name}"] = 2 * size**3 / seconds / 1e12
    return found


def _launches(device: torch.device, count: int) -> Figures:
    number = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(count):
            number.add_(1)

    def wait_each() -> None:
        for _ in range(count // 10):
            number.add_(1)
            _wait(device)

    return {
        "launch_us": _best(device, launch_all) / count * 1e6,
        "launch_and_wait_us": _best(device, wait_each) / (count // 10) * 1e6,
    }


def _transfers(device: torch.device, num_bytes: int) -> Figures:
    """Measure copies between host and card, each way, from pinned and from pageable memory."""
    on_card = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    found = {}
    for kind in ("pageable", "pinned") if device.type == "cuda" else ("pageable",):
        on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        to_card = _best(device, partial(on_card.copy_, on_host, non_blocking=True))
        from_card = _best(device, partial(on_host.copy_, on_card, non_blocking=True))
        found[f"to_card_{kind}_gb_per_second"] = num_bytes / to_card / 1e9
        found[f"from_card_{kind}_gb_per_second"] = num_bytes / from_card / 1e9
    return found


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Return the fewest seconds of a few repeats; one more before them is not counted."""
    return min(list(_times(device, work))[1:])


def _times(device: torch.device, work: Callable[[], object]) -> Iterator[float]:
    for _ in range(_NUM_REPEATS + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        yield time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: Path) -> int:
    """Return the bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
