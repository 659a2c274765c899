"""`python -m infra.images`: builds the images with docker, podman or buildah, whichever is here.

python -m infra.images [--target NAME ...] [--builder PROGRAM] [--wheel FILE] [-- MORE OPTIONS OF THE BUILDER]

The wheel is the one with compiled kernels for this machine, built by infra.wheels if --wheel names none. Each image is
named tandem/TARGET:VERSION. Exit code 0 built, 1 not built.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infra.images.context import ROOT, make_context, version

CONTEXT = ROOT / "build" / "images" / "context"
SERVICES = ("control-plane", "kv-transfer", "prefill", "decode", "encode")
TARGETS = (*SERVICES, "prefill-cuda", "decode-cuda", "encode-cuda", "prefill-vllm", "decode-vllm")
_BUILDERS = {"docker": ["docker", "build"], "podman": ["podman", "build"], "buildah": ["buildah", "bud"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the images; return the exit code."""
    ours, more = _divided(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    builder = options.builder or next(filter(shutil.which, _BUILDERS), None)
    if builder is None:
        print(f"no builder of images: install one of {', '.join(_BUILDERS)}", file=sys.stderr)
        return 1
    wheel = options.wheel or built_wheel()
    if wheel is None:
        return 1
    make_context(wheel, CONTEXT)
    for target in options.target or SERVICES:
        started = time.monotonic()
        name = image_name(target)
        if subprocess.run(build_command(_BUILDERS[builder], target, name, more), check=False).returncode:
            print(f"{name} was not built: {builder} says above why", file=sys.stderr)
            return 1
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


def image_name(target: str, tag: str = "") -> str:
    """Return the name of a target's image: tandem/decode:0.2.0, tandem/decode:0.2.0-cuda. The tag is the version."""
    service = target.removesuffix("-cuda").removesuffix("-vllm")
    return f"tandem/{service}:{tag or version()}{target.removeprefix(service)}"


def build_command(
    builder: Sequence[str], target: str, name: str, more: Sequence[str] = (), context: Path = CONTEXT
) -> list[str]:
    """Return the command that builds one image from a context. Docker's own format has health checks."""
    is_docker = builder[0] == "docker"
    arguments = {
        "VERSION": name.rpartition(":")[2].removesuffix("-cuda").removesuffix("-vllm"),
        "REVISION": _git("rev-parse", "HEAD"),
    }
    command = [*builder, "--target", target, "--tag", name]
    command += [] if is_docker else ["--format", "docker", "--layers"]
    command += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    return [*command, *more, "--file", str(context / "Dockerfile"), str(context)]


def built_wheel() -> Path | None:
    """Build the wheel for this machine; return its path, or None with a sentence on stderr."""
    command = [sys.executable, "-m", "infra.wheels", "--platform", platform.machine(), "--out", str(CONTEXT.parent)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return Path(done.stdout.split()[-1]) if done.returncode == 0 else None


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the arguments at `--`: ours, and those of the builder."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def _git(*arguments: str) -> str:
    """Return what git says about this checkout; "" where there is none."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.images", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="an image; all for CPUs if left out")
    parser.add_argument("--builder", choices=tuple(_BUILDERS), help="the first of these that is installed if left out")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel to install")
    return parser


if __name__ == "__main__":
    sys.exit(main())
