"""Builds the pure wheel, offline.

It is built from a copy of the tree: files of an earlier build in the clone cannot get into it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "control_plane",
    "decode_svc",
    "kv_transfer_svc",
    "prefill_svc",
    "encode_svc",
    "tandem_client",
    "tandem_engine",
    "tandem_machine",
    "tandem_runtime",
    "tandem_vllm",
    "tandem_worker",
)
GENERATED = "protos/gen/"
_BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def tree_files() -> list[str]:
    """Return the paths of the files that git tracks or would track, relative to the root."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in output.split("\0") if name and (ROOT / name).is_file()})


def shipped_files() -> dict[str, Path]:
    """Return the files that belong into the wheel: the path there -> the file in the tree."""
    shipped = {name: ROOT / name for name in tree_files() if name.split("/")[0] in PACKAGES}
    generated = {name.removeprefix(GENERATED): ROOT / name for name in tree_files() if name.startswith(GENERATED)}
    return shipped | generated


def build_wheel(folder: Path) -> Path:
    """Build the wheel into `folder`, with the setuptools of this environment, and return its path."""
    copy = folder / "tree"
    for name in tree_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", _BUILD, str(folder)], cwd=copy, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
