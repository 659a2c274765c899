"""Starts images under wrong conditions: each must end with exit code 2 and a sentence that names the remedy.

The two-version test makes a wheel of another version from the one that the images have.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.namespaces import NetworkHost
from infra.images.context import make_context, version
from tests.install import buildah
from tests.install.containers import Container, ContainerSpec, Mount

STATE, RUNTIME = "/var/lib/tandem", "/run/tandem"
_END_SECONDS = 90.0
_REFUSED = 2
_STRANGER = 4242
NEXT = "0.0.1+next"
"""The version of the wheel with another version; no release will have it."""


def check(spec: ContainerSpec, kv: ContainerSpec, network: NetworkHost, folder: Path) -> Iterator[str]:
    """Start a gateway, or a KV service, under each wrong condition. Yield what was checked; raises AssertionError."""
    state = folder / "enemies"
    kv = replace(kv, environment={**kv.environment, "TANDEM_KV_INSECURE_PLAINTEXT": "true"})  # it does not wait to join
    for what, of, mount, words in (
        ("a state volume of another user", spec, _folder(state / "stranger", _STRANGER), "--state-dir"),
        ("a read-only state volume", spec, replace(_folder(state / "readonly"), read_only=True), "--state-dir"),
        ("a runtime volume of another user", kv, _folder(state / "sockets", _STRANGER, RUNTIME), "TANDEM_RUNTIME_DIR"),
    ):
        _refuses(_with(of, mount), network, folder, what, words)
        yield what
    with _small_disk(state / "full") as full:
        _refuses(_with(spec, full), network, folder, "a state volume that is full", "full")
    yield "a state volume that is full"
    beyond = {"TANDEM_CONTROL_LISTEN": "0.0.0.0:8642", "TANDEM_CONTROL_INSECURE_HTTP": "true"}
    exposed = replace(spec, environment={**spec.environment, **beyond})
    _refuses(exposed, network, folder, "beyond loopback without an account", "account create")
    yield "beyond loopback without an account"


def build_next(wheel: Path, target: str) -> str:
    """Build the image of a target from a wheel of another version; return its name."""
    context = buildah.FOLDER / "next"
    make_context(_renamed(wheel, buildah.FOLDER), context)
    return buildah.build(target, "next", context)


def _refuses(spec: ContainerSpec, network: NetworkHost, folder: Path, what: str, words: str) -> None:
    container = Container(replace(spec, name=f"{spec.name}-refused"), network, folder)
    before = len(container.output)
    try:
        container.start()
        code, output = container.wait(_END_SECONDS), container.output[before:]
    finally:
        container.close()
    assert code == _REFUSED, f"{what}: exit code {code}\n{output[-4000:]}"
    assert words in output, f"{what}: {words} is not named\n{output[-4000:]}"


def _with(spec: ContainerSpec, mount: Mount) -> ContainerSpec:
    return replace(spec, mounts=[mount, *(each for each in spec.mounts if each.target != mount.target)])


def _folder(path: Path, owner: int = 10001, target: str = STATE) -> Mount:
    path.mkdir(parents=True)
    os.chown(path, owner, owner)
    path.chmod(0o700)
    return Mount(path, target)


@contextmanager
def _small_disk(path: Path) -> Iterator[Mount]:
    """Make a disk of 64 KiB that is full."""
    path.mkdir(parents=True)
    options = "size=64k,uid=10001,gid=10001,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tandem-full", str(path)], check=True)
    try:
        (path / "filler").write_bytes(bytes(60 << 10))
        yield Mount(path, STATE)
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _renamed(wheel: Path, folder: Path) -> Path:
    """Write the same wheel with another version: in its name, in its metadata and in the paths of RECORD."""
    old, new = f"tandem_serve-{version()}", f"tandem_serve-{NEXT}"
    made = folder / wheel.name.replace(old, new)
    changes: Mapping[str, tuple[str, str]] = {
        "METADATA": (f"\nVersion: {version()}\n", f"\nVersion: {NEXT}\n"),
        "RECORD": (f"{old}.dist-info/", f"{new}.dist-info/"),
    }
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            data = source.read(entry)
            path = entry.filename.replace(f"{old}.dist-info/", f"{new}.dist-info/")
            if change := changes.get(path.removeprefix(f"{new}.dist-info/")):
                data = data.decode().replace(*change).encode()
            target.writestr(path, data)
    return made
