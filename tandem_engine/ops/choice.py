"""Chooses the op layer for a device and dtype."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from tandem_engine.ops.base import Ops
from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tandem_engine.ops.cpu.library import load_kernels, set_num_threads
from tandem_engine.ops.sdpa_ops import SdpaOps
from tandem_engine.ops.torch_ops import TorchOps
from tandem_engine.settings import Kernels


def choose_ops(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
    report: Callable[[str], None],
    cores: Sequence[int] = (),
) -> Ops:
    """Return the fastest op layer that computes in `dtype` on `device`.

    `report` gets where the C++ kernels come from, or why there are none.

    `cores`: one for each thread, which is pinned to it; empty: the kernel places the threads.
    Raises KernelsUnavailable if `kernels` is "cpp" and the C++ kernels are unavailable.
    """
    if device.type != "cpu":
        _refuse_unless(kernels != "cpp", f"the C++ kernels are for CPUs, the device is {device}")
        return SdpaOps(device, _host_library(kernels, num_threads, report, cores))
    if kernels == "torch" or dtype != torch.float32:
        _refuse_unless(kernels != "cpp", f"the C++ kernels compute in float32, the dtype is {dtype}; take --dtype auto")
        return TorchOps(device)
    try:
        ops = load_cpu_ops(num_threads=num_threads, cores=cores)
    except KernelsUnavailable as error:
        if kernels == "cpp":
            raise
        report(f"without C++ kernels, which are several times faster: {error}")
        return TorchOps(device)
    report(f"C++ kernels: {ops.origin}")
    return ops


def _host_library(
    kernels: Kernels, num_threads: int, report: Callable[[str], None], cores: Sequence[int]
) -> ctypes.CDLL | None:
    """Return the library that samples and computes grammar masks for a device; None: numpy and Python do."""
    if kernels == "torch":
        return None
    try:
        found = load_kernels()
    except KernelsUnavailable as error:
        report(f"without C++ sampling: a row that is not greedy takes 8 to 25 ms of the step: {error}")
        return None
    set_num_threads(found.library, num_threads, cores)
    report(f"C++ sampling: {found.origin}")
    return found.library


def _refuse_unless(is_right: bool, message: str) -> None:
    if not is_right:
        raise KernelsUnavailable(message)
