"""Examines the GPUs of this machine: cards, driver, and whether torch is built for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem_client.cli.doctor.finding import Finding, size

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


def gpu(pci: Path = _PCI, nvml: Any = None) -> Iterator[Finding]:
    """Compare the cards on the PCI bus with what NVML lists. `nvml`: the module pynvml, or one in its place."""
    num_cards = sum(_is_card(device) for device in pci.glob("*")) if pci.is_dir() else 0
    nvml = nvml or _nvml()
    if nvml is None:
        if num_cards:
            yield Finding("gpu", "warn", f"{num_cards} cards, and no NVML", "pip install nvidia-ml-py")
        else:
            yield Finding("gpu", "note", "no card: the workers compute on the CPU")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if num_cards:
            remedy = "install NVIDIA's driver, and the container toolkit in containers (nvidia-smi must work)"
            yield Finding("gpu", "fail", f"{num_cards} cards, but the driver does not answer: {error}", remedy)
        else:
            yield Finding("gpu", "note", "no card: the workers compute on the CPU")
        return
    try:
        yield from _cards(nvml)
    finally:
        nvml.nvmlShutdown()
    if _torch_is_for_cpus():
        yield Finding("gpu", "warn", "torch is built for CPUs only", "pip install torch (the build with CUDA)")


def _cards(nvml: Any) -> Iterator[Finding]:
    version = nvml.nvmlSystemGetDriverVersion()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, held = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            remedy = "look for XID lines in the kernel's log (dmesg), then reset or replace the card"
            yield Finding("gpu", "fail", f"card {index} does not answer: {error}", remedy)
            continue
        text = f"{name}: {size(held.free)} of {size(held.total)} free, driver {version}"
        yield Finding("gpu", "ok", text)


def _is_card(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    except OSError:  # a device without these files is none
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS)


def _nvml() -> Any:
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    return pynvml


def _torch_is_for_cpus() -> bool:
    """Return whether an installed torch has no CUDA; reads its version file, because an import takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).parent / "version.py"
    return version.is_file() and "cuda: Optional[str] = None" in version.read_text()
