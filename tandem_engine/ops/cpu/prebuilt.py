"""Finds the compiled kernels that a platform wheel brings, and chooses by the features of this machine's CPUs.

prebuilt/<digest>-<level>.so      digest: of the sources beside it; level: see LEVELS

Only wheels have this folder (`python -m infra.wheels`). A library of other sources is never loaded: bits belong to the
sources, whose digest is a part of the numerics class.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.ops.cpu.compile import SOURCES

PREBUILT = Path(__file__).parent / "prebuilt"
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """A set of CPU features that a library is compiled for."""

    name: str
    machine: str
    """As `platform.machine()` names it."""
    flags: tuple[str, ...]
    """Compiler flags. Tuning alone would change no bit; -march decides which instructions may occur."""
    needs: frozenset[str]
    """Every feature that -march allows the compiler to use, as /proc/cpuinfo names it."""


# x86-64 psABI, "Micro-Architecture Levels". Linux names SSE3 "pni" and LZCNT "abm"; the operating system's part
# (OSXSAVE) is in "avx" and "avx512f": Linux hides both where it does not save the registers.
_V1 = frozenset({"fpu", "cx8", "cmov", "fxsr", "mmx", "sse", "sse2", "syscall"})
_V2 = _V1 | {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}
_V3 = _V2 | {"xsave", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVELS = (
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    # Armv8.0 with NEON, which every 64-bit Arm server has. The kernels use nothing of later versions but LSE's atomics,
    # and -moutline-atomics uses those where the CPU has them.
    Level("aarch64", "aarch64", ("-march=armv8-a", "-moutline-atomics"), frozenset({"fp", "asimd"})),
)
"""The best first."""


def levels_of(machine: str) -> tuple[Level, ...]:
    return tuple(level for level in LEVELS if level.machine == machine)


def file_name(level: Level) -> str:
    return f"{SOURCES.digest()}-{level.name}.so"


def usable_libraries(folder: Path = PREBUILT) -> tuple[Sequence[tuple[Level, Path]], str]:
    """Return the libraries in `folder` that this machine can run, the best first, and why there are no others."""
    if not folder.is_dir():
        return (), "the package holds no compiled kernels (it is not a platform wheel)"
    features, found, reasons = cpu_features(), [], []
    for level in levels_of(platform.machine()):
        path = folder / file_name(level)
        if missing := sorted(level.needs - features):
            reasons.append(f"{level.name} needs CPU features that are missing: {' '.join(missing)}")
        elif not path.is_file():
            reasons.append(f"{path} is missing: the package's compiled kernels are of other sources")
        else:
            found.append((level, path))
    return found, "; ".join(reasons) or f"there are none for {platform.machine()}"


def cpu_features() -> frozenset[str]:
    """Return the features that all CPUs of this machine have; none if Linux does not tell."""
    try:
        text = _CPU_INFO.read_text()
    except OSError:
        return frozenset()
    each = [frozenset(line.split()) for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)]
    return frozenset.intersection(*each) if each else frozenset()
