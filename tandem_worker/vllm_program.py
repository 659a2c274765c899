"""Starts the engine process in vLLM's virtual environment, which has none of our packages."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import tandem_engine
from tandem_engine.client import Program

_PACKAGES = ("tandem_engine", "tandem_machine", "tandem_vllm")


def vllm_program(python: str, state_dir: Path, module: str = "tandem_vllm") -> Program:
    """Return the program of `tandem_vllm`, or of a module in it, for an interpreter with vLLM.

    Its PYTHONPATH has a folder of links to the packages that it needs, in the state directory: the folder that they are
    installed in may also hold a torch and a transformers, which are not those of vLLM.
    """
    root = Path(tandem_engine.__file__).resolve().parent.parent
    folder = state_dir / "vllm-packages" / hashlib.blake2b(str(root).encode(), digest_size=8).hexdigest()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _PACKAGES:
        _link(folder / name, root / name)
    return Program((python, "-P", "-m", module), str(folder))


def _link(link: Path, target: Path) -> None:
    """Make a link, or replace an older one, at once: workers that start at the same time do the same."""
    if link.is_symlink() and link.readlink() == target:
        return
    with tempfile.TemporaryDirectory(dir=link.parent) as folder:
        new = Path(folder) / link.name
        new.symlink_to(target)
        os.replace(new, link)  # noqa: PTH105 - Path.replace would do the same
