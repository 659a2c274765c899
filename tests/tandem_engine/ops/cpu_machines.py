"""Provides the CPU kernels for this machine and for older instruction sets."""

from __future__ import annotations

import platform
import shutil
from functools import cache
from pathlib import Path

import pytest

from tandem_engine.ops.cpu import CpuOps, load_cpu_ops
from tandem_engine.ops.cpu.compile import NATIVE

FLAGS = {
    "native": NATIVE,
    "avx2": ("-march=x86-64-v3",),
    "sse2": ("-march=x86-64",),
}
"""Compiler flags; code for the last two also runs on every later x86."""


@cache
def cpu_ops(machine: str = "native") -> CpuOps:
    """Return the ops, compiled once into the user's cache; skip the test if they cannot be compiled."""
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    if machine != "native" and platform.machine() != "x86_64":
        pytest.skip(f"{machine} is an x86 variant")
    if machine == "avx2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX2")
    return load_cpu_ops(machine_flags=FLAGS[machine])


def has_fma() -> bool:
    """Return whether the native kernels fuse products, as every AVX2 machine does."""
    return "no-fma" not in cpu_ops().name
