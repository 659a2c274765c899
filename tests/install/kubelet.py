"""Does what Kubernetes does with a pod, with processes: order, probes, variables, volumes, users, its end.

Each pod has a network of its own with an address, joined by a bridge; names of pods and services are in /etc/hosts.
Limits of memory and cores are not set, and NetworkPolicies not in force: infra/kubernetes/links.py reads those.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.namespaces import NetworkHost
from infra.kubernetes.manifests import Container, Document, Workload
from tests.install.sandbox import Ended, Running, Sandbox, base_variables, owned_folder, wait_until

_USER = 10_001
_NETWORK = "10.231.64"
_RESTART_SECONDS = 1.0
"""Kubernetes waits 10 s before the first restart; we have no time for that."""


class Cluster:
    """The machine: a bridge, names, Secrets and ConfigMaps, volumes that outlive pods."""

    def __init__(self, documents: Sequence[Document], read_only: Mapping[str, Path], extra: Mapping[str, str]) -> None:
        """`read_only`: paths that every container has beside its image; `extra`: variables, likewise."""
        self.documents = documents
        self.secrets: dict[str, Mapping[str, str]] = {}
        self.claims: dict[str, Path] = {}
        """Folders of PersistentVolumeClaims by name."""
        self.read_only = read_only
        self.extra = extra
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-pods-")))
        self.folder.chmod(0o755)
        self.node = self.new_network("node", f"{_NETWORK}.1")
        self.node.ip("link add pods type bridge")
        self.node.ip(f"address add {_NETWORK}.1/24 dev pods")
        self.node.ip("link set pods up")
        self._num_addresses = 1
        self._hosts = self.folder / "hosts"
        self._names: dict[str, str] = {"localhost": "127.0.0.1"}
        self.pods: list[Pod] = []

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()
        self._stack.close()

    def new_network(self, name: str, address: str) -> NetworkHost:
        host = NetworkHost(name, address)
        self._stack.callback(host.close)
        host.ip("link set lo up")
        return host

    def new_pod_network(self, name: str) -> NetworkHost:
        """Make a network with an address on the bridge."""
        self._num_addresses += 1
        number = self._num_addresses
        host = self.new_network(name, f"{_NETWORK}.{number}")
        inside = f"/proc/{os.getpid()}/task/{host.thread_id}/ns/net"
        self.node.ip(f"link add pod{number} type veth peer name eth0 netns {inside}")
        self.node.ip(f"link set pod{number} master pods up")
        host.ip(f"address add {host.address}/24 dev eth0")
        host.ip("link set eth0 up")
        host.ip(f"route add default via {_NETWORK}.1")
        return host

    def name(self, name: str, address: str) -> None:
        """Let all pods find `name`. The file is changed in place: pods have it mounted."""
        self._names[name] = address
        self._hosts.write_text("".join(f"{ip} {each}\n" for each, ip in self._names.items()))

    @property
    def hosts(self) -> Path:
        return self._hosts

    def volume(self, pod: str, name: str) -> Path:
        """Make the folder of a volume as the kubelet does: of root, and open to the group of fsGroup."""
        return owned_folder(self.folder / pod / name, 0, _USER, 0o2777)


@dataclass
class End:
    """How a pod ended."""

    seconds: float
    exit_codes: Mapping[str, int | None]
    """By container; None: killed at the end of the grace period."""


@dataclass
class Pod:
    """A pod of a workload."""

    cluster: Cluster
    workload: Workload
    name: str
    network: NetworkHost = field(init=False)
    running: dict[str, Running] = field(default_factory=dict)
    is_ready: bool = False
    is_ending: bool = False

    def __post_init__(self) -> None:
        self.network = self.cluster.new_pod_network(self.name)
        service = self.workload.raw["spec"].get("serviceName")
        if service:
            self.cluster.name(f"{self.name}.{service}.tandem.svc", self.network.address)
        self._volumes = self._make_volumes()
        self.cluster.pods.append(self)

    def start(self) -> None:
        """Start init containers and sidecars one after the other, then the others; wait until all are ready."""
        for container in self.workload.containers:
            running = self.launch(container)
            if container.is_init and not container.is_sidecar:
                self._finish(container, running)
            elif container.is_sidecar:
                self._wait_for(container, "startupProbe")
        for container in self._serving():
            self._wait_for(container, "startupProbe")
        for container in self._serving():
            self._wait_for(container, "readinessProbe")
        self.is_ready = True

    def _serving(self) -> list[Container]:
        return [each for each in self.workload.containers if each.runs_on]

    def launch(self, container: Container) -> Running:
        """Start a container, or start it again: its volumes stay."""
        variables = self.variables(container)
        sandbox = Sandbox(
            name=f"{self.name}/{container.name}",
            network=self.network,
            user=self.workload.pod["securityContext"]["runAsUser"],
            log=self.cluster.folder / f"{self.name}.{container.name}.log",
            environment={**variables, **base_variables(), "HOSTNAME": self.name, **self.cluster.extra},
            writable={
                mount["mountPath"]: self._volumes[mount["name"]]
                for mount in container.raw["volumeMounts"]
                if not mount.get("readOnly")
            },
            read_only={
                "/etc/hosts": self.cluster.hosts,
                **self.cluster.read_only,
                **{
                    mount["mountPath"]: self._volumes[mount["name"]]
                    for mount in container.raw["volumeMounts"]
                    if mount.get("readOnly")
                },
            },
            host_name=self.name,
        )
        assert container.raw["securityContext"]["readOnlyRootFilesystem"], "the sandbox has no other root"
        self.running[container.name] = sandbox.start(container.command(variables))
        return self.running[container.name]

    def variables(self, container: Container) -> dict[str, str]:
        fields = {"status.podIP": self.network.address, "metadata.name": self.name}
        return container.variables(self.cluster.documents, self.cluster.secrets, fields)

    def _make_volumes(self) -> dict[str, Path]:
        claims = [each["metadata"]["name"] for each in self.workload.raw["spec"].get("volumeClaimTemplates", [])]
        found = {}
        for name in claims:  # of this ordinal, and kept when the pod ends
            key = f"{name}-{self.name}"
            found[name] = self.cluster.claims.get(key) or self.cluster.volume("claims", key)
            self.cluster.claims[key] = found[name]
        for volume in self.workload.pod["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            name = volume["name"]
            found[name] = self.cluster.claims[claim] if claim else self.cluster.volume(self.name, name)
        return found

    def _finish(self, container: Container, running: Running) -> None:
        """Wait for an init container. Its end is up to the operator: an account, a database."""
        code = running.wait(180)
        assert code == 0, f"{self.name}/{container.name} ended with {code}: {running.tail()}"

    def _wait_for(self, container: Container, kind: str) -> None:
        """Wait until a probe passes, as often as its manifest permits; restart the container where it has ended."""
        if kind not in container.raw:
            return
        probe = container.raw[kind]
        seconds = probe.get("failureThreshold", 60) * probe["periodSeconds"]

        def passes() -> bool:
            running = self.running[container.name]
            if running.exit_code is not None:
                print(f"    {self.name}/{container.name} ended with {running.exit_code}: {running.tail(3)}", flush=True)
                self.launch(container)
                return False
            return self.probe(container, probe)

        try:
            wait_until(passes, seconds, f"{kind} of {self.name}/{container.name}", every=_RESTART_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.running[container.name].tail()}") from None

    def probe(self, container: Container, probe: Mapping[str, Any]) -> bool:
        """Ask as the kubelet does: a command in the container, or a request of the machine to the pod's address."""
        seconds = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            return self._passes(container, probe["exec"]["command"], seconds)
        port = probe["httpGet"]["port"]
        number = self.workload.ports[port] if isinstance(port, str) else port
        return self.cluster.node.run(lambda: _answers(self.network.address, number, probe["httpGet"]["path"], seconds))

    def _passes(self, container: Container, command: Sequence[str], seconds: float) -> bool:
        try:
            return self.running[container.name].execute(command, seconds).returncode == 0
        except (Ended, subprocess.TimeoutExpired):
            return False

    def stop(self) -> End:
        """End the pod: out of the endpoints, preStop, SIGTERM, sidecars last, SIGKILL after the grace period."""
        began = time.monotonic()
        self.is_ending = True
        deadline = began + self.workload.pod["terminationGracePeriodSeconds"]
        sidecars = [each for each in self._serving() if each.is_sidecar]
        others = [each for each in self._serving() if not each.is_sidecar]
        codes: dict[str, int | None] = {}
        with ThreadPoolExecutor(len(others)) as pool:
            ended = pool.map(lambda each: (each.name, self._end(each, deadline)), others)
            codes.update(ended)
        for sidecar in reversed(sidecars):
            codes[sidecar.name] = self._end(sidecar, deadline)
        self.is_ready = False
        return End(time.monotonic() - began, codes)

    def _end(self, container: Container, deadline: float) -> int | None:
        running = self.running[container.name]
        time.sleep(container.pre_stop_seconds)
        running.terminate()
        code = running.wait(deadline - time.monotonic())
        if code is None:
            running.kill()
        return code

    def kill(self) -> None:
        for running in self.running.values():
            running.kill()


def pods_of(cluster: Cluster, workload: Workload, most: int) -> list[Pod]:
    """Make the pods of a workload, not more than `most`."""
    replicas = min(most, workload.raw["spec"].get("replicas", 1))
    return [Pod(cluster, workload, f"{workload.name}-{number}") for number in range(replicas)]


def endpoints(pods: Sequence[Pod], port: int) -> list[str]:
    """Return the addresses that a Service has: of pods that are ready and do not end."""
    return [f"http://{each.network.address}:{port}" for each in pods if each.is_ready and not each.is_ending]


def _answers(address: str, port: int, path: str, seconds: float) -> bool:
    connection = http.client.HTTPConnection(address, port, timeout=seconds)
    try:
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    except OSError:
        return False
    finally:
        connection.close()
