"""Checks what every image must be: its size, user, labels, bill of materials, and that no build tool is inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.audit import Result, Verdict, audit, locked_packages, normalized
from infra.images.context import ROOT, version

MEGABYTE = 1_000_000
MAX_BYTES: Mapping[str, int] = {
    "control-plane": 250 * MEGABYTE,
    "kv-transfer": 250 * MEGABYTE,
    "prefill": 1200 * MEGABYTE,
    "decode": 1200 * MEGABYTE,
    "encode": 1200 * MEGABYTE,
}
"""Compressed bytes of each image at most."""
USER = 10001
_SBOM = "usr/share/doc/tandem/sbom.json"
_BUILD_TOOLS = (
    "gcc*",
    "g++*",
    "c++*",
    "cc",
    "cpp",
    "cpp-*",
    "clang*",
    "make",
    "ld",
    "as",
    "cmake",
    "ninja",
    "pip*",
    "x86_64-linux-gnu-*",
)
_BINARIES = ("bin", "usr/bin", "usr/local/bin", "sbin", "usr/sbin", "opt/tandem/bin")
_LABELS = ("title", "description", "version", "revision", "licenses")
_OF_THE_BUILD = ("build", "etc/pip.conf", "etc/xdg", "root/opt", "root/etc", "root/.cache", "root/.config", "opt/[!t]*")
_INSTALLED = "import importlib.metadata as m; print('\\n'.join(d.name + '==' + d.version for d in m.distributions()))"


def check(target: str, root: Path, configuration: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with an image, [] if nothing is."""
    return [
        *_check_configuration(configuration),
        *_check_files(root),
        *_check_sbom(root),
        *(f"{name} is installed in {target}" for name in _torch_packages(target, root)),
    ]


def scan(root: Path, folder: Path) -> tuple[Verdict, list[str]]:
    """Compare an image's Python packages with the advisory database, and with the locked set.

    Return the verdict of `make audit`'s own code, and the packages that are not those of constraints.txt.
    """
    locked = locked_packages(ROOT / "constraints.txt")
    packages = {name: _public(number) for name, number in _python_packages(root).items() if name != "tandem-serve"}
    strange = [
        f"{name} {number}, not {locked.get(name)}" for name, number in packages.items() if locked.get(name) != number
    ]
    listing = folder / "installed.txt"
    listing.write_text("".join(f"{name}=={number}\n" for name, number in sorted(packages.items())))
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # pip-audit lies beside this Python
    verdict = audit(listing)
    assert verdict.result is not Result.CLEAN or packages, "an image without packages is not clean"
    return verdict, strange


def _check_configuration(configuration: Mapping[str, Any]) -> list[str]:
    problems = []
    if configuration["User"] != f"{USER}:{USER}":
        problems.append(f"its user is {configuration['User']!r}")
    if not configuration.get("Healthcheck"):
        problems.append("it has no health check")
    if configuration.get("StopSignal") != "SIGTERM":
        problems.append(f"its stop signal is {configuration.get('StopSignal')!r}")
    if set(configuration.get("Volumes") or ()) != {"/var/lib/tandem", "/run/tandem"}:
        problems.append(f"its volumes are {configuration.get('Volumes')}")
    labels = configuration.get("Labels") or {}
    problems += [
        f"its label {name} is missing" for name in _LABELS if not labels.get(f"org.opencontainers.image.{name}")
    ]
    if labels.get("org.opencontainers.image.version") != version():
        problems.append(f"its label says version {labels.get('org.opencontainers.image.version')}")
    return problems


def _check_files(root: Path) -> list[str]:
    tools = [path for folder in _BINARIES for name in _BUILD_TOOLS for path in (root / folder).glob(name)]
    problems = [f"the build tool /{path.relative_to(root)} is inside" for path in tools]
    problems += [f"pip is inside: /{path.relative_to(root)}" for path in root.glob("**/*-packages/pip")]
    problems += [
        f"/{path.relative_to(root)} is left of the build" for name in _OF_THE_BUILD for path in root.glob(name)
    ]
    problems += [f"a list of apt is inside: {path.name}" for path in (root / "var/lib/apt/lists").glob("*_*")]
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            found = path.lstat()
            inside = f"/{path.relative_to(root)}"
            if found.st_uid == USER and inside not in ("/var/lib/tandem", "/run/tandem"):
                problems.append(f"{inside} is the user's own")
            if found.st_mode & 0o6000 and path.is_file():
                problems.append(f"{inside} is setuid or setgid")
    return problems


def _check_sbom(root: Path) -> list[str]:
    """The bill of materials has the packages that are there, and no others."""
    installed = _output_of("chroot", str(root), "/opt/tandem/bin/python", "-c", _INSTALLED)
    python = {normalized(name): number for name, _, number in (line.partition("==") for line in installed)}
    administration = f"--admindir={root / 'var/lib/dpkg'}"
    debian = set(_output_of("dpkg-query", administration, "--show", "--showformat", "${Package} ${Version}\n"))
    problems = []
    if (named := _python_packages(root)) != python:
        problems.append(f"the SBOM differs in Python packages: {sorted(set(named.items()) ^ set(python.items()))}")
    if (named_by_debian := _components(root, "pkg:deb/")) != debian:
        problems.append(f"the SBOM differs in Debian packages: {sorted(named_by_debian ^ debian)}")
    return problems


def _torch_packages(target: str, root: Path) -> list[str]:
    """Return torch and what comes with it, where no computation is; the CUDA build's packages anywhere."""
    unwanted = (
        ("nvidia-c", "triton") if target in ("prefill", "decode", "encode") else ("torch", "nvidia", "triton", "numpy")
    )
    return [name for name in _python_packages(root) if name.startswith(unwanted)]


def _python_packages(root: Path) -> dict[str, str]:
    lines = (each.split(" ") for each in _components(root, "pkg:pypi/", is_default=True))
    return {normalized(name): number for name, number in lines}


def _components(root: Path, kind: str, *, is_default: bool = False) -> set[str]:
    """Return the components of a kind; a package that was installed from a file, as ours, has no package URL."""
    listed = json.loads((root / _SBOM).read_text())["components"]
    default = kind if is_default else ""
    return {f"{each['name']} {each['version']}" for each in listed if each.get("purl", default).startswith(kind)}


def _public(number: str) -> str:
    """Return a version without its local part: 2.13.0 of 2.13.0+cpu."""
    return number.partition("+")[0]


def _output_of(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
