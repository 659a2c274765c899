"""Chooses the op layer for a device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem_engine.ops.base import Ops
from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
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
        return SdpaOps(device)
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


def _refuse_unless(is_right: bool, message: str) -> None:
    if not is_right:
        raise KernelsUnavailable(message)
