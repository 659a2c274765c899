"""Examines the GPUs of this machine: cards, driver, and whether torch and CUDA can use them."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandem_client.cli.doctor.finding import Finding, size

_PCI = Path("/sys/bus/pci/devices")
_DEV = Path("/dev")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_ANSWER_SECONDS = 15.0
"""A driver that takes longer hangs; the first call on a machine without the persistence daemon takes some seconds."""
_LEAST_CAPABILITY = {13: (7, 5)}
"""By the major version of CUDA: the oldest GPUs that it computes on (CUDA 13 release notes: Turing)."""
_LOOK_AT_LOG = "look for XID lines in the kernel's log (dmesg), then reset or replace the card"


def gpu(
    pci: Path = _PCI,
    nvml: Any = None,
    *,
    dev: Path = _DEV,
    torch_cuda: str | None = None,
    answer_seconds: float = _ANSWER_SECONDS,
) -> Iterator[Finding]:
    """Compare the cards on the PCI bus with what NVML lists, and the driver with torch.

    `nvml`: the module pynvml, or one in its place. `torch_cuda`: torch's version of CUDA, "" if it is built without;
    None: as installed.
    """
    num_cards = sum(_is_card(device) for device in pci.glob("*")) if pci.is_dir() else 0
    nvml = nvml or _nvml()
    if nvml is None:
        if num_cards:
            yield Finding("gpu", "warn", f"{num_cards} cards, and no NVML", "pip install nvidia-ml-py")
        else:
            yield Finding("gpu", "note", "no card: the workers compute on the CPU")
        return
    cuda = _cuda_of_torch() if torch_cuda is None else torch_cuda
    found = _within(answer_seconds, lambda: list(_driver(nvml, num_cards, cuda, dev)))
    if found is None:
        yield Finding("gpu", "fail", f"the driver has not answered for {answer_seconds:.0f} s", _LOOK_AT_LOG)
    else:
        yield from found


def _within(seconds: float, examine: Callable[[], list[Finding]]) -> list[Finding] | None:
    """Return the findings, None if they do not come in time: a call of a driver that hangs never ends."""
    results: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: results.append(examine()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _driver(nvml: Any, num_cards: int, cuda: str | None, dev: Path) -> Iterator[Finding]:
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
        yield from _cards(nvml, cuda)
    except nvml.NVMLError as error:
        yield Finding("gpu", "fail", f"the driver does not list its cards: {error}", _LOOK_AT_LOG)
    finally:
        nvml.nvmlShutdown()
    if (dev / "nvidiactl").exists() and not (dev / "nvidia-uvm").exists():
        remedy = "run `nvidia-modprobe -u -c 0`, and give containers the device too (the container toolkit does)"
        yield Finding("gpu", "fail", f"no {dev / 'nvidia-uvm'}: NVML answers, but CUDA does not start", remedy)
    if cuda == "":
        yield Finding("gpu", "warn", "torch is built for CPUs only", "pip install torch (the build with CUDA)")


def _cards(nvml: Any, cuda: str | None) -> Iterator[Finding]:
    version, num_cards = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetCount()
    yield from _versions(nvml, version, cuda)
    handles = {}
    for index in range(num_cards):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
            yield from _card(nvml, index, handles[index], version, cuda)
        except nvml.NVMLError as error:
            yield Finding("gpu", "fail", f"card {index} does not answer: {error}", _LOOK_AT_LOG)
    yield from _chosen(nvml, num_cards, handles)


def _versions(nvml: Any, driver: str, cuda: str | None) -> Iterator[Finding]:
    """Compare the driver's CUDA with torch's. Within a major version older drivers do."""
    of_driver = _told(nvml, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
    if not cuda or of_driver is None or of_driver // 1000 >= _major(cuda):
        return
    text = f"driver {driver} has CUDA {of_driver // 1000}.{of_driver % 1000 // 10}, torch is built for CUDA {cuda}"
    remedy = "install a newer driver, or torch for the driver's CUDA (download.pytorch.org/whl)"
    yield Finding("gpu", "fail", f"{text}: the workers would compute on the CPU", remedy)


def _card(nvml: Any, index: int, handle: Any, driver: str, cuda: str | None) -> Iterator[Finding]:
    name, held = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    yield Finding("gpu", "ok", f"{name}: {size(held.free)} of {size(held.total)} free, driver {driver}")
    capability = _told(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    least = _LEAST_CAPABILITY.get(_major(cuda)) if cuda else None
    if capability is not None and least is not None and tuple(capability) < least:
        has, needs = (".".join(map(str, each)) for each in (capability, least))
        text = f"card {index} has compute capability {has}, CUDA {cuda} needs {needs}"
        yield Finding("gpu", "warn", text, "install torch for CUDA 12 (download.pytorch.org/whl)")
    mode = _told(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle))
    if mode == 2:  # NVML_COMPUTEMODE_PROHIBITED
        remedy = f"nvidia-smi --id={index} --compute-mode=DEFAULT"
        yield Finding("gpu", "fail", f"card {index} admits no process (compute mode PROHIBITED)", remedy)
    elif mode == 3:  # NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        remedy = f"nvidia-smi --id={index} --compute-mode=DEFAULT, or one worker per card"
        text = f"card {index} admits one process (compute mode EXCLUSIVE_PROCESS): prefill and decode cannot share it"
        yield Finding("gpu", "warn", text, remedy)
    errors = _told(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))  # uncorrected, since the last boot
    if errors:
        yield Finding("gpu", "warn", f"card {index} has had {errors:,} uncorrected ECC errors", _LOOK_AT_LOG)
    if _is_in_mig_mode(nvml, handle) and not _instances(nvml, handle):
        remedy = "make instances (nvidia-smi mig -cgi ... -C), or end MIG mode (nvidia-smi --multi-instance-gpu=0)"
        yield Finding("gpu", "fail", f"card {index} is in MIG mode and has no instance for this process", remedy)


def _chosen(nvml: Any, num_cards: int, handles: dict[int, Any]) -> Iterator[Finding]:
    """Look up each name in CUDA_VISIBLE_DEVICES: CUDA silently ends the list at the first that names nothing."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return
    if chosen.strip() in ("", "-1"):
        yield Finding("gpu", "note", "CUDA_VISIBLE_DEVICES hides all cards: the workers compute on the CPU")
        return
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles.values()]
    instances = [uuid for handle in handles.values() for uuid in _instances(nvml, handle)]
    for name in (part.strip() for part in chosen.split(",")):
        is_there = (
            int(name) < num_cards
            if name.isdigit()
            else name.startswith("MIG-GPU-")  # of drivers before 470: the worker looks
            or (name.startswith(("GPU-", "MIG-")) and sum(uuid.startswith(name) for uuid in uuids + instances) == 1)
        )
        if not is_there:
            text = f"CUDA_VISIBLE_DEVICES={chosen}: {name!r} names no card, and CUDA ignores all behind it"
            yield Finding("gpu", "warn", text, "name cards as `nvidia-smi -L` lists them")
            return


def _is_in_mig_mode(nvml: Any, handle: Any) -> bool:
    mode = _told(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    return mode is not None and mode[0] == 1


def _instances(nvml: Any, handle: Any) -> list[str]:
    if not _is_in_mig_mode(nvml, handle):
        return []
    found = []
    for place in range(_told(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        instance = _told(nvml, lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))  # type: ignore[misc]
        if instance is not None:
            found.append(nvml.nvmlDeviceGetUUID(instance))
    return found


def _told(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return what the driver answers; None from cards and drivers without such a figure."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):  # a release of nvidia-ml-py without the call
        return None


def _major(version: str) -> int:
    return int(version.partition(".")[0])


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


def _cuda_of_torch() -> str | None:
    """Return the CUDA that torch is built for, "" for none; None without torch or its version file.

    Reads the file, because an import takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).parent / "version.py"
    if not version.is_file():
        return None
    text = version.read_text()
    found = re.search(r"^cuda: Optional\[str\] = '([0-9.]+)'", text, re.MULTILINE)
    return found.group(1) if found else "" if "cuda: Optional[str] = None" in text else None
