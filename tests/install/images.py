"""Builds the images, looks into them, and runs a fleet from them: `python -m tests.install images`.

Needs root, buildah, debootstrap and bubblewrap, and what pip and apt need. Everything is kept in build/images: the
first run takes some minutes, a second one builds what changed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.namespaces import NetworkHost
from infra.audit import Result
from infra.images.__main__ import CONTEXT, SERVICES, built_wheel, image_name
from infra.images.context import make_context
from tests.install import buildah, image_checks, image_enemies
from tests.install.client import LONG, Answer, status_of, stream
from tests.install.containers import Container, ContainerSpec, Mount, wait_until

_FREE_BYTES = 8 << 30
_READY_SECONDS = 240.0
_PORTS = {"kv-transfer": 8650, "prefill": 8651, "decode": 8652}
_NAMES = {"kv-transfer": "KV", "prefill": "PREFILL", "decode": "DECODE"}


def main() -> int:
    """Build, check, run; return 0 if everything held."""
    if missing := buildah.missing_programs():
        print(f"missing: {', '.join(missing)}; install the packages of these names, and bubblewrap for bwrap")
        return 1
    buildah.FOLDER.mkdir(parents=True, exist_ok=True)
    if (free := buildah.free_bytes()) < _FREE_BYTES:
        print(f"{free >> 30} GiB are free in {buildah.FOLDER}, {_FREE_BYTES >> 30} GiB are needed")
        return 1
    wheel = build_all()
    with step("build decode from a wheel of another version"):
        other = image_enemies.build_next(wheel, "decode")
    with ExitStack() as stack:
        roots = {target: stack.enter_context(buildah.mounted(image_name(target))) for target in SERVICES}
        check_all(roots)
        run_fleet(roots, stack.enter_context(buildah.mounted(other)))
    return 0


def build_all(targets: Sequence[str] = SERVICES) -> Path:
    """Build the images of all targets that changed; return the wheel. Raises CalledProcessError, AssertionError."""
    with step("base image by debootstrap"):
        buildah.forget_old_layers()
        buildah.make_base()
    with step("wheel with compiled kernels"):
        wheel = built_wheel()
    assert wheel is not None, "no wheel: infra.wheels says above why"
    make_context(wheel, CONTEXT)
    for target in targets:
        with step(f"build {target}"):
            buildah.build(target)
    return wheel


def check_all(roots: dict[str, Path]) -> None:
    """Print the sizes, and fail for an image that is too large, or not what it must be."""
    print(f"{'image':16}{'MB':>8}{'MB compressed':>16}{'limit':>8}")
    problems = []
    for target in SERVICES:
        plain, compressed = buildah.compressed_bytes(image_name(target))
        limit = image_checks.MAX_BYTES[target]
        print(f"{target:16}{plain / 1e6:8.1f}{compressed / 1e6:16.1f}{limit / 1e6:8.0f}", flush=True)
        if compressed > limit:
            problems.append(f"{target} has {compressed:,} bytes compressed, the limit is {limit:,}")
        configuration = buildah.configuration(image_name(target))
        problems += [f"{target}: {each}" for each in image_checks.check(target, roots[target], configuration)]
    assert not problems, "\n".join(problems)
    for target in ("control-plane", "kv-transfer", "decode"):
        with step(f"scan of {target}"):
            verdict, strange = image_checks.scan(roots[target], buildah.FOLDER)
            print(f"  {verdict.line} (exit code of `make audit`: {verdict.result.value})")
        assert not strange, f"{target} has packages that constraints.txt does not name: {strange}"
        assert verdict.result is not Result.VULNERABLE, verdict.line


def run_fleet(roots: dict[str, Path], other: Path) -> None:
    """Start the four services in one network, stream, disturb, and end all. `other`: a decode image's other version."""
    with fleet(roots) as (containers, folder):
        gateway, decode = containers["control-plane"], containers["decode"]
        kv = containers["kv-transfer"].spec
        for what in image_enemies.check(gateway.spec, kv, gateway.network, folder):
            print(f"  refuses to start, and names the remedy: {what}", flush=True)
        started = time.monotonic()
        for container in containers.values():
            container.start()
        for name, container in containers.items():
            print(f"  {name} is healthy after {container.wait_healthy(_READY_SECONDS):.1f} s more", flush=True)
        network = gateway.network
        wait_until(lambda: status_of(network, "/readyz") == 200, _READY_SECONDS, "the gateway is ready")
        first = stream(network, {"prompt": "What is 17 + 25?"})
        print(f"  first token {time.monotonic() - started:.1f} s after the start: {first.text!r}", flush=True)
        assert "42" in first.text, first
        undisturbed = stream(network, LONG)
        assert survived(network, decode) == undisturbed.text, "the answer changed when the decode worker died"
        print(f"  the decode worker was killed in a stream: all {undisturbed.num_events} events came, the same text")
        _replace_in_stream(decode, other, undisturbed.text)
        for name in ("prefill", "decode", "kv-transfer", "control-plane"):
            print(f"  SIGTERM: {name} ended with 0 after {containers[name].stop():.1f} s", flush=True)


def _replace_in_stream(worker: Container, other: Path, expected: str) -> None:
    """Replace a worker by the image of another version in the middle of a stream, as an upgrade does."""

    def on_event(number: int) -> None:
        if number == 60:
            worker.terminate()

    assert stream(worker.network, LONG, "", on_event).text == expected, "the drain changed the answer"
    assert worker.wait(worker.spec.grace_seconds) == 0, worker.output[-4000:]
    worker.spec = replace(worker.spec, root=other)
    worker.start()
    worker.wait_healthy(_READY_SECONDS)
    assert stream(worker.network, LONG).text == expected, "the other version's answer differs"
    print(f"  the decode worker drained in a stream; version {image_enemies.NEXT} took over: the same text", flush=True)


def survived(network: NetworkHost, worker: Container, token: str = "", kill_at: int = 60) -> str:
    """Kill a worker in the middle of a stream, start it again; return the text of the stream."""

    def on_event(number: int) -> None:
        if number == kill_at:
            worker.kill()
            worker.start()

    answer: Answer = stream(network, LONG, token, on_event)
    assert answer.num_events > kill_at, "the stream was over before the worker was killed"
    worker.wait_healthy(_READY_SECONDS)
    return answer.text


@contextmanager
def fleet(roots: dict[str, Path]) -> Iterator[tuple[dict[str, Container], Path]]:
    """Make the four services as `docker run --network host --read-only` does, with two volumes in a folder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=buildah.FOLDER, prefix="volumes-")))
        network = NetworkHost("machine", "127.0.0.1")
        stack.callback(network.close)
        network.ip("link set lo up")
        containers = {}
        for target in ("control-plane", "kv-transfer", "prefill", "decode"):
            container = Container(spec_of(target, roots[target], folder), network, folder)
            stack.callback(container.close)
            containers[target] = container
        yield containers, folder


def spec_of(target: str, root: Path, folder: Path) -> ContainerSpec:
    """Return how an image runs on a machine's own network: everything but the addresses is the image's."""
    configuration = buildah.configuration(image_name(target))
    return ContainerSpec(
        name=target,
        root=root,
        command=configuration["Entrypoint"],
        environment={**variables_of(configuration["Env"]), **_addresses(target)},
        user=configuration["User"],
        mounts=[Mount(folder / path.strip("/").replace("/", "-"), path) for path in configuration["Volumes"]],
        health=configuration["Healthcheck"]["Test"][1:],
        hostname="machine",  # all services on the machine's own network have its name, and so one host id
    )


def _addresses(target: str) -> dict[str, str]:
    if target == "control-plane":
        return {"TANDEM_CONTROL_LISTEN": "127.0.0.1:8642", "TANDEM_CONTROL_GRPC_LISTEN": "127.0.0.1:8643"}
    return {f"TANDEM_{_NAMES[target]}_LISTEN": f"127.0.0.1:{_PORTS[target]}"}


def variables_of(lines: Sequence[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what is done, and its seconds."""
    started = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - started:.1f} s", flush=True)
