"""Makes a platform wheel of the pure one: the same files, and the compiled libraries of a machine.

The `wheel` command packs it, so that RECORD has the digest of every file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from control_plane.routing import compiled_library
from infra.wheels.libraries import CannotBuild, libraries_for, platform_tag, routing_for
from infra.wheels.pure import ROOT
from tandem_engine.ops.cpu.prebuilt import PREBUILT, file_name

IN_WHEEL = PREBUILT.relative_to(ROOT)
"""The folder of the compiled kernels in a platform wheel."""
_PYTHON_TAG = "py3-none"


def build_platform_wheel(pure: Path, machine: str, folder: Path) -> Path:
    """Write the wheel of `machine` into `folder`, and return its path. Raises CannotBuild."""
    libraries = {IN_WHEEL / file_name(level): library for level, library in libraries_for(machine).items()}
    libraries[routing_in_wheel(machine)] = routing_for(machine)
    tag = platform_tag(machine, list(libraries.values()))
    unpacked = folder / f"unpacked-{machine}"
    _wheel("unpack", "--dest", str(unpacked), str(pure))
    (tree,) = unpacked.iterdir()
    for path, library in libraries.items():
        (tree / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(library, tree / path)
        (tree / path).chmod(0o755)
    _describe(tree, tag)
    _wheel("pack", "--dest-dir", str(folder), str(tree))
    shutil.rmtree(unpacked)
    (made,) = folder.glob(f"*-{_PYTHON_TAG}-{tag}.whl")
    return made


def routing_in_wheel(machine: str) -> Path:
    """Return the path of the library of routing in a platform wheel."""
    return compiled_library.PREBUILT.relative_to(ROOT) / compiled_library.file_name(machine)


def _describe(tree: Path, tag: str) -> None:
    """Write the tag into WHEEL, and that the wheel is for one kind of machine."""
    (path,) = tree.glob("*.dist-info/WHEEL")
    lines = [line for line in path.read_text().splitlines() if line.startswith(("Wheel-Version:", "Generator:"))]
    path.write_text("\n".join([*lines, "Root-Is-Purelib: false", f"Tag: {_PYTHON_TAG}-{tag}", ""]))


def _wheel(*arguments: str) -> None:
    command = [sys.executable, "-m", "wheel", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip()[-1000:]
        raise CannotBuild(f"`{' '.join(command)}` failed: {reason}; `pip install wheel` brings the command")
