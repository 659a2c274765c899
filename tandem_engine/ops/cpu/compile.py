"""Compiles the kernels' shared library with this machine's compiler, once per machine.

A platform wheel brings compiled libraries (prebuilt.py); then nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem_machine.compiler import CannotCompile, Sources, compile_library

SOURCES = Sources(Path(__file__).parent / "cpp", "kernels.cpp")
NATIVE = ("-march=native",)


class KernelsUnavailable(Exception):
    """The C++ kernels are unavailable; the message names the reason and the remedy. Plain torch still works."""


def compile_kernels(
    folder: Path | None = None, machine_flags: Sequence[str] = NATIVE, compiler: str | None = None
) -> Path:
    """Return the kernels for this machine, as `compile_library` does. Raises KernelsUnavailable."""
    try:
        return compile_library(SOURCES, folder, machine_flags, compiler)
    except CannotCompile as error:
        raise KernelsUnavailable(str(error)) from error
