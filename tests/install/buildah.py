"""Builds the images on a machine without a registry: Debian's buildah, and a base that debootstrap makes.

Everything is kept in build/images: a second run builds what changed. What apt and pip need on this machine (their
configuration, folders of packages, certificates) is mounted during the build, and no part of an image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.images.__main__ import CONTEXT, build_command, image_name

FOLDER = CONTEXT.parent
BASE = "docker.io/library/debian:bookworm-slim"
_SUITE = "bookworm"
_STORE = ("--root", str(FOLDER / "store"), "--runroot", str(FOLDER / "run"))
_MACHINE = FOLDER / "machine"
"""What pip needs on this machine; a build sees it as the home folder of root, where nothing of an image lies."""
_NOT_IN_SLIM = ("usr/share/man", "usr/share/info", "usr/share/locale", "var/lib/apt/lists", "var/cache/apt")
"""What Debian's slim image leaves out beside documents."""
_MAX_IMAGES = 300
"""Images and layers in the store, about 50 for each build of all targets from another wheel: some 15 GB."""
_NEEDED_PROGRAMS = ("buildah", "debootstrap", "bwrap")


def missing_programs() -> list[str]:
    return [name for name in _NEEDED_PROGRAMS if shutil.which(name) is None]


def buildah(*arguments: str, check: bool = True) -> str:
    """Run buildah with a store of its own; return what it prints. Raises CalledProcessError, with the reason shown."""
    command = ["buildah", *_STORE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        print(f"$ {' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}", file=sys.stderr)
        done.check_returncode()
    return done.stdout.strip()


def make_base() -> None:
    """Make the base image unless it is there."""
    if buildah("images", "--quiet", "--noheading", BASE, check=False):
        return
    system = FOLDER / "debian"
    shutil.rmtree(system, ignore_errors=True)
    subprocess.run(["debootstrap", "--variant=minbase", _SUITE, str(system)], check=True, stdout=subprocess.DEVNULL)
    for name in _NOT_IN_SLIM:
        for path in (system / name).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (system / "usr" / "share" / "doc").rglob("*"):
        if path.name != "copyright" and not path.is_dir():
            path.unlink()
    container = buildah("from", "scratch")
    try:
        buildah("add", "--quiet", container, str(system), "/")
        buildah(
            "config",
            "--cmd",
            "bash",
            "--env",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            container,
        )
        buildah("commit", "--quiet", "--format", "docker", container, BASE)
    finally:
        buildah("rm", container)
    shutil.rmtree(system)


def forget_old_layers() -> None:
    """Remove the layers of earlier builds once they are many: the next build starts anew."""
    if len(buildah("images", "--all", "--quiet").split()) > _MAX_IMAGES:
        buildah("rmi", "--prune", "--force")


def build(target: str, tag: str = "", context: Path = CONTEXT) -> str:
    """Build the image of a target from a context; return its name. Raises CalledProcessError."""
    more = ["--isolation", "chroot", "--pull-never", "--quiet", *_mounts()]
    name = image_name(target, tag)
    buildah(*build_command(["bud"], target, name, more, context))
    return name


def configuration(image: str) -> dict[str, Any]:
    """Return the configuration of an image as Docker names its fields: Entrypoint, Env, User, Healthcheck, ..."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    return found


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    """Mount the file system of an image."""
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def compressed_bytes(image: str) -> tuple[int, int]:
    """Return the bytes of an image's layers, and of the same compressed with gzip, as a registry stores them."""
    archive = FOLDER / "pushed"
    shutil.rmtree(archive, ignore_errors=True)
    buildah("push", "--quiet", "--disable-compression=false", "--format", "oci", image, f"dir:{archive}")
    layers = json.loads((archive / "manifest.json").read_text())["layers"]
    compressed = sum(int(layer["size"]) for layer in layers)
    plain = sum(_unpacked_bytes(archive / layer["digest"].partition(":")[2]) for layer in layers)
    shutil.rmtree(archive)
    return plain, compressed


def _unpacked_bytes(layer: Path) -> int:
    done = subprocess.run(f"gzip -dc {layer} | wc -c", shell=True, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _mounts() -> list[str]:
    """Return options that let apt and pip inside a build work as on this machine.

    Both targets are in the base: buildah leaves a mount point that it makes behind in the image.
    """
    _make_machine_folder()
    return ["--volume", "/etc/apt:/etc/apt:ro", "--volume", f"{_MACHINE}:/root:ro"]


def _make_machine_folder() -> None:
    """Collect pip's configuration and the files and folders that it names, with their paths as a build sees them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    configured = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = dict(re.findall(r"^(?::env:|\w+)\.([\w-]+)='(.*)'$", configured, re.MULTILINE))
    shutil.rmtree(_MACHINE, ignore_errors=True)
    (_MACHINE / ".config" / "pip").mkdir(parents=True)
    text = "[global]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
    for path in sorted({Path(found) for found in re.findall(r"(?<=[ /=])(/[^\s/][^\s]*)", text)}):
        if path.exists() and path.is_absolute():
            _link(_whole(path))
            text = text.replace(str(path), f"/root{path}")
    (_MACHINE / ".config" / "pip" / "pip.conf").write_text(text)


def _link(path: Path) -> None:
    """Put a file, or a folder, into the machine folder; hard links where the file system is the same."""
    target = _MACHINE / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        subprocess.run(
            ["sh", "-c", 'cp -rlL "$0" "$1" 2>/dev/null || cp -rL "$0" "$1"', str(path), str(target)], check=True
        )


def _whole(path: Path) -> Path:
    """Return the folder to take: an index in /opt/NAME may link to any folder of /opt/NAME."""
    return Path(*path.parts[:3]) if path.parts[1] == "opt" else path


def free_bytes() -> int:
    found = os.statvfs(FOLDER.parent)
    return found.f_bavail * found.f_frsize
