"""Provides the kernels that platform wheels bring, and the program that hashes what each kernel computes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from infra.wheels.libraries import CannotBuild, compiler_for, library_for
from tandem_engine.ops.cpu import CpuOps
from tandem_engine.ops.cpu.compile import SOURCES
from tandem_engine.ops.cpu.library import load_file
from tandem_engine.ops.cpu.prebuilt import Level, cpu_features, levels_of

_PROGRAM = Path(__file__).with_name("kernel_bits.cpp")
_EMULATOR = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")


def own_levels() -> tuple[Level, ...]:
    """Return the levels that this machine can run, the best first."""
    return tuple(level for level in levels_of(platform.machine()) if level.needs <= cpu_features())


def wheel_library(level: Level) -> Path:
    """Return the library as a wheel holds it; skip the test if it cannot be compiled."""
    try:
        return library_for(level)
    except CannotBuild as error:
        lacking(str(error))


@cache
def wheel_ops() -> tuple[CpuOps, ...]:
    """Return the ops of every library of this machine's wheel that it can run."""
    return tuple(CpuOps(load_file(wheel_library(level)), f"prebuilt for {level.name}") for level in own_levels())


class KernelBits:
    """The program for one kind of machine; an emulator runs that of another."""

    def __init__(self, machine: str, folder: Path) -> None:
        self._program = folder / f"kernel_bits-{machine}"
        self._runner: Sequence[str] = ()
        if machine != platform.machine():
            self._runner = _EMULATOR
            if shutil.which(_EMULATOR[0]) is None:
                lacking(f"there is no command `{_EMULATOR[0]}`; run `make services`")
        try:
            compiler = compiler_for(machine)
        except CannotBuild as error:
            lacking(str(error))
        flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-pthread", f"-I{SOURCES.folder}")
        subprocess.run([compiler, *flags, str(_PROGRAM), "-o", str(self._program), "-ldl"], check=True)

    def of(self, library: Path, num_threads: int = 1) -> dict[str, str]:
        """Return the hash of every function of the library."""
        command = [*self._runner, str(self._program), str(library), str(num_threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return {name: bits for name, _, bits in (line.partition(" ") for line in done.stdout.splitlines())}


def lacking(reason: str) -> NoReturn:
    """Skip the test, with a sentence; fail if skips are not allowed."""
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
