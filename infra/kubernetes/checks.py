"""Checks a pod of the manifests: security, commands, probes, drain times, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from infra.kubernetes.manifests import Container, Document, Workload, urls_in
from tests.infra.commands import FOLLOWER, SERVICES, check_http_probe, check_probe, check_program, load

_IMAGES = {
    "control_plane": "control-plane",
    "kv_transfer_svc": "kv-transfer",
    "prefill_svc": "prefill",
    "decode_svc": "decode",
    "encode_svc": "encode",
    FOLLOWER: "decode",
}
_ROLES = {"kv_transfer_svc": "kv", "prefill_svc": "prefill", "decode_svc": "decode", "encode_svc": "encode"}
_WITH_CUDA = ("prefill_svc", "decode_svc", "encode_svc")
_WITH_VLLM = ("prefill_svc", "decode_svc", FOLLOWER)
_USER = 10_001
_VOLUMES = {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "projected", "csi", "ephemeral"}
"""Kinds of volumes that restricted pod security permits, and that these manifests use."""


def check_workload(workload: Workload, documents: Sequence[Document], version: str) -> list[str]:
    """Return the problems of a workload's pod."""
    found = [*_security(workload), *_drain(workload, documents), *_volumes(workload)]
    for container in workload.containers:
        found += _container(workload, container, documents, version)
    return [f"{workload.kind} {workload.name}: {each}" for each in found]


def _container(workload: Workload, container: Container, documents: Sequence[Document], version: str) -> Iterator[str]:
    try:
        variables = container.variables(documents)
    except ValueError as error:
        yield str(error)
        return
    checks = [_hardened(container), _image(container, version), _sizes(container, variables)]
    if refused := check_program(container.command(variables), variables):
        checks.append(iter(refused))
    else:  # what follows reads its settings
        checks += [_ports(workload, container, variables), _probes(workload, container, variables)]
    for problems in checks:
        yield from (f"container {container.name}: {each}" for each in problems)


# ------------------------------------------------------------------------------------------------- security


def _security(workload: Workload) -> Iterator[str]:
    """Restricted pod security (kubernetes.io, Pod Security Standards), and what is stricter with us."""
    pod, context = workload.pod, workload.pod.get("securityContext", {})
    wanted = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for name, value in wanted.items():
        if context.get(name) != value:
            yield f"securityContext.{name} is {context.get(name)}, must be {value}"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is not permitted"
    for name in ("automountServiceAccountToken", "enableServiceLinks"):
        if pod.get(name) is not False:
            yield f"{name} must be false: Tandem asks nothing of Kubernetes"


def _hardened(container: Container) -> Iterator[str]:
    wanted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if (context := container.raw.get("securityContext", {})) != wanted:
        yield f"securityContext is {context}, must be {wanted}"
    if any("hostPort" in port for port in container.raw.get("ports", [])):
        yield "hostPort is not permitted"


def _volumes(workload: Workload) -> Iterator[str]:
    """Every mount has its volume, and the folders of TANDEM_STATE_DIR and TANDEM_RUNTIME_DIR lie in one."""
    claims = {each["metadata"]["name"] for each in workload.raw["spec"].get("volumeClaimTemplates", [])}
    volumes = {each["name"]: set(each) - {"name"} for each in workload.pod.get("volumes", [])}
    for name, kinds in volumes.items():
        if not kinds <= _VOLUMES:
            yield f"volume {name} is of the kind {', '.join(kinds)}, which restricted pod security refuses"
    for container in workload.containers:
        for mount in container.raw.get("volumeMounts", []):
            if mount["name"] not in claims | set(volumes):
                yield f"container {container.name} mounts {mount['name']}, and there is no such volume"
        paths = [mount["mountPath"] for mount in container.raw.get("volumeMounts", [])]
        for path in ("/var/lib/tandem", "/run/tandem"):
            if path not in paths:
                yield f"container {container.name} has no volume at {path}, and its root is read-only"


# ------------------------------------------------------------------------------------------------- commands


def _image(container: Container, version: str) -> Iterator[str]:
    wanted = f"tandem/{_IMAGES[container.module or 'control_plane']}:{version}"
    allowed = [] if container.module == FOLLOWER else [wanted]
    allowed += [f"{wanted}-cuda"] if container.module in _WITH_CUDA else []
    allowed += [f"{wanted}-vllm"] if container.module in _WITH_VLLM else []
    if container.raw["image"] not in allowed:
        yield f"the image is {container.raw['image']}, must be {' or '.join(allowed)}"


def _settings(container: Container, variables: dict[str, str]) -> Any:
    """Return the settings that a container runs with; None for a script. A command with problems raises ValueError."""
    if container.module not in SERVICES:
        return None
    return load(container.module, container.command(variables)[3:], variables)


def _sizes(container: Container, variables: dict[str, str]) -> Iterator[str]:
    resources = container.raw.get("resources", {})
    for kind in ("requests", "limits"):
        if "memory" not in resources.get(kind, {}):
            yield f"resources.{kind}.memory is missing: pools are sized by it"
    has_gpu = "nvidia.com/gpu" in resources.get("limits", {})
    wants_gpu = "--device=cuda" in container.command(variables) or container.module == FOLLOWER  # it has its leader's
    if has_gpu != wants_gpu or has_gpu != container.raw["image"].endswith(("-cuda", "-vllm")):
        yield "a GPU in the limits, --device=cuda and an image for CUDA belong together"


def _ports(workload: Workload, container: Container, variables: dict[str, str]) -> Iterator[str]:
    """What listens beyond loopback is declared, and nothing else; ports differ inside a pod."""
    settings = _settings(container, variables)
    if settings is None:
        return
    names = ("listen", "grpc_listen", "enrolment_address", "data_listen", "metrics_listen")
    addresses = [str(getattr(settings, name)) for name in names if getattr(settings, name, "")]
    open_ports = {int(each.rpartition(":")[2]) for each in addresses if not each.startswith("127.")}
    declared = {each["containerPort"] for each in container.raw.get("ports", [])}
    if not open_ports and declared and workload.component == "demo":
        return  # a name for `kubectl port-forward`
    if open_ports != declared:
        yield f"it listens on {sorted(open_ports)} beyond loopback, and declares {sorted(declared)}"
    advertised = [str(getattr(settings, name)) for name in ("advertise", "data_advertise") if hasattr(settings, name)]
    if open_ports and any(not each for each in advertised):
        yield "it listens beyond loopback and advertises no address; add --advertise=$(POD_IP):PORT"


# ------------------------------------------------------------------------------------------------- probes


def _probes(workload: Workload, container: Container, variables: dict[str, str]) -> Iterator[str]:
    raw = container.raw
    if container.runs_on and "livenessProbe" not in raw and container.module != FOLLOWER:  # it ends by itself
        yield "there is no livenessProbe"
    if container.module == "control_plane" and "readinessProbe" not in raw:
        yield "a gateway without a readinessProbe gets requests that nobody answers"
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        if kind in raw:
            yield from (f"{kind}: {each}" for each in _probe(workload, container, kind, variables))


def _probe(workload: Workload, container: Container, kind: str, variables: dict[str, str]) -> Iterator[str]:
    probe, seconds = container.raw[kind], container.raw[kind].get("timeoutSeconds", 1)
    if "httpGet" in probe:
        port = probe["httpGet"]["port"]
        number = workload.ports.get(port) if isinstance(port, str) else port
        if number is None:
            yield f"there is no port {port}"
        else:
            yield from check_http_probe(probe["httpGet"]["path"], number, _settings(container, variables).listen)
        return
    if "exec" not in probe:
        yield "it must be httpGet or exec: kubelet's gRPC probe shows no certificate"
        return
    command = probe["exec"]["command"]
    if container.module == "control_plane":
        for _, number, path in urls_in(command):
            yield from check_http_probe(path, number, _settings(container, variables).listen)
        waits = re.search(r"timeout=(\d+)", " ".join(command))
        if waits is None or float(waits[1]) >= seconds:
            yield f"its command must end by itself before timeoutSeconds, {seconds}"
        return
    yield from check_probe(command, seconds)
    if kind != "readinessProbe" and "--alive" not in command:
        yield "without --alive it ends a process that loads its model, or drains"
    folder = f"--certificate={variables.get('TANDEM_STATE_DIR')}/certificates/{_ROLES[container.module]}"
    if folder not in command:
        yield f"{folder} is missing"
    port = _settings(container, variables).listen.rpartition(":")[2]
    if command[3] != f"127.0.0.1:{port}":
        yield f"it asks {command[3]}, and the process listens on port {port}"


# ------------------------------------------------------------------------------------------------- drain


def _drain(workload: Workload, documents: Sequence[Document]) -> Iterator[str]:
    """Containers end at once; sidecars after them, one after the other: all within the grace period."""
    together, after = 0.0, 0.0
    for container in workload.containers:
        if not container.runs_on or container.module == FOLLOWER:  # links.py compares a follower with its leader
            continue
        try:
            settings = _settings(container, container.variables(documents))
        except ValueError:
            return  # it has been told
        longest = getattr(settings, "longest_drain_seconds", settings.drain_seconds)
        seconds = container.pre_stop_seconds + longest
        if container.is_sidecar:
            after += seconds
        else:
            together = max(together, seconds)
        if container.module == "control_plane" and workload.component == "gateway" and not container.pre_stop_seconds:
            yield "a gateway needs a preStop sleep: endpoints name it for some seconds after its end has begun"
    if (grace := workload.pod.get("terminationGracePeriodSeconds", 30)) <= together + after:
        yield f"terminationGracePeriodSeconds is {grace}, must be more than preStop and drain, {together + after:g} s"
