"""Compiles the kernels for each level of CPUs and the library of routing, and reads which glibc these need.

The libraries are kept in build/kernels by sources, compiler and flags: a second build compiles nothing.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

from control_plane.routing.compiled_library import SOURCES
from infra.wheels.pure import ROOT
from tandem_engine.ops.cpu.compile import KernelsUnavailable, compile_kernels
from tandem_engine.ops.cpu.prebuilt import Level, levels_of
from tandem_machine.compiler import CannotCompile, compile_library

MACHINES = ("x86_64", "aarch64")
_FOLDER = ROOT / "build" / "kernels"
_TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
_PACKAGES = {"x86_64": "g++-x86-64-linux-gnu", "aarch64": "g++-aarch64-linux-gnu"}
# libstdc++ lies in the library, since a machine may have none or an older one; exports.map hides it. libgcc_s is every
# machine's, as glibc itself needs it. The static libgcc of GCC 12 needs glibc 2.35, which RHEL 9 lacks.
_SELF_CONTAINED = (
    "-static-libstdc++",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--gc-sections",
    f"-Wl,--version-script={Path(__file__).with_name('exports.map')}",
    "-Wl,-s",
)
_OF_EVERY_MACHINE = re.compile(r"(libc|libm|libpthread|libdl|librt|libgcc_s|ld-linux[-\w]*)\.so\.\d+")


class CannotBuild(Exception):
    """A wheel cannot be built here; the message names what is missing and the remedy."""


def compiler_for(machine: str) -> str:
    """Return the C++ compiler whose code runs on `machine`. Raises CannotBuild."""
    cross = f"{_TRIPLETS[machine]}-g++"
    wanted = ("g++", cross) if machine == platform.machine() else (cross,)
    for name in wanted:
        if path := shutil.which(name):
            return path
    package = "g++" if machine == platform.machine() else _PACKAGES[machine]
    raise CannotBuild(
        f"no compiler for {machine}: {' or '.join(wanted)} is not on PATH; `apt-get install {package}` brings it, or "
        "build the pure wheel with --platform any"
    )


def libraries_for(machine: str) -> dict[Level, Path]:
    """Return the compiled kernels of every level of `machine`. Raises CannotBuild."""
    compiler = compiler_for(machine)
    return {level: library_for(level, compiler) for level in levels_of(machine)}


def library_for(level: Level, compiler: str | None = None) -> Path:
    """Return the kernels that are compiled for `level`. Raises CannotBuild."""
    flags = (*level.flags, *_SELF_CONTAINED)
    try:
        return compile_kernels(_FOLDER, flags, compiler or compiler_for(level.machine))
    except KernelsUnavailable as error:
        raise CannotBuild(str(error)) from error


def routing_for(machine: str) -> Path:
    """Return the library of routing, compiled for any CPU of `machine`. Raises CannotBuild."""
    try:
        return compile_library(SOURCES, _FOLDER, _SELF_CONTAINED, compiler_for(machine))
    except CannotCompile as error:
        raise CannotBuild(str(error)) from error


def glibc_of(library: Path) -> tuple[int, int]:
    """Return the oldest glibc that has every symbol which `library` needs. Raises CannotBuild."""
    needs = _readelf("--version-info", library).partition("Version needs section")[2]
    names = [name for name in re.findall(r"Name: (\S+)", needs) if not name.startswith("GCC_")]
    versions = [re.match(r"GLIBC_(\d+)\.(\d+)", name) for name in names]
    known = [(int(version[1]), int(version[2])) for version in versions if version]
    if not names or len(known) < len(names):
        raise CannotBuild(
            f"no manylinux tag covers the symbols that {library} needs: {', '.join(names) or 'none named'}"
        )
    return max(known)


def platform_tag(machine: str, libraries: list[Path]) -> str:
    """Return the manylinux tag (PEP 600) of a wheel with these libraries. Raises CannotBuild."""
    for library in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", library))
        if foreign := [name for name in needed if not _OF_EVERY_MACHINE.fullmatch(name)]:
            raise CannotBuild(f"{library} needs {', '.join(foreign)}, which a machine may lack; link it statically")
    major, minor = max(map(glibc_of, libraries))
    return f"manylinux_{major}_{minor}_{machine}"


def _readelf(option: str, library: Path) -> str:
    try:
        command = ["readelf", "--wide", option, str(library)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuild(f"cannot read {library}: {error}; `apt-get install binutils` brings readelf") from error
