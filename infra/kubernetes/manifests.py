"""Reads rendered manifests: which containers run, with which commands, variables, probes and volumes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from infra.kubernetes.images import image_variables

Document = Mapping[str, Any]

WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet")
SECRETS: Mapping[str, Mapping[str, str]] = {
    "tandem-join": {role: f"tdj1.{role}" for role in ("kv", "prefill", "decode", "encode")},
    "tandem-gateway": {
        "TANDEM_SECRET": "00" * 32,
        "TANDEM_CONTROL_DATABASE_URL": "postgresql://tandem:password@postgresql/tandem",
    },
}
"""Secrets that an operator makes, with values of their form."""
FIELDS: Mapping[str, str] = {"status.podIP": "10.0.0.1", "metadata.name": "pod-0"}
"""Fields of a pod that variables are taken from, with values of their form."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML was built so
_REFERENCE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class Container:
    """A container of a pod; `raw` is its part of the manifest."""

    raw: Document
    is_init: bool

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def is_sidecar(self) -> bool:
        """Whether it runs beside the pod's containers: started before them, ended after them."""
        return self.is_init and self.raw.get("restartPolicy") == "Always"

    @property
    def runs_on(self) -> bool:
        """Whether it serves as long as its pod lives."""
        return self.is_sidecar or not self.is_init

    @property
    def module(self) -> str:
        """The Python module that it runs; "" for a script."""
        command = self.raw["command"]
        return str(command[2]) if command[1:2] == ["-m"] else ""

    @property
    def pre_stop_seconds(self) -> int:
        """How long it goes on before it gets SIGTERM."""
        return int(self.raw.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))

    def command(self, variables: Mapping[str, str]) -> list[str]:
        """Return the command with its arguments, and `$(NAME)` replaced by variables."""
        words = [*self.raw["command"], *self.raw.get("args", [])]
        return [expand(word, variables) for word in words]

    def variables(
        self,
        documents: Sequence[Document],
        secrets: Mapping[str, Mapping[str, str]] = SECRETS,
        fields: Mapping[str, str] = FIELDS,
    ) -> dict[str, str]:
        """Return its environment, the image's part too. Raises ValueError for a source or a key that is not there."""
        sources = {("ConfigMap", each["metadata"]["name"]): each["data"] for each in of_kind(documents, "ConfigMap")}
        sources |= {("Secret", name): values for name, values in secrets.items()}
        found = image_variables(self.raw["image"])
        for each in self.raw.get("envFrom", []):
            kind, name = (
                ("ConfigMap", each["configMapRef"]["name"])
                if "configMapRef" in each
                else ("Secret", each["secretRef"]["name"])
            )
            if (kind, name) not in sources:
                raise ValueError(f"container {self.name}: there is no {kind} {name}")
            found |= sources[kind, name]
        for each in self.raw.get("env", []):
            found[each["name"]] = expand(_value(each, sources, fields, self.name), found)
        return found


@dataclass(frozen=True)
class Workload:
    """A Deployment, a DaemonSet or a StatefulSet, and its pod; or the leader or the followers of a LeaderWorkerSet."""

    raw: Document

    @property
    def kind(self) -> str:
        return str(self.raw["kind"])

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def pod(self) -> Document:
        spec: Document = self.raw["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.raw["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Container]:
        """All containers, in the order in which they start."""
        inits = [Container(each, is_init=True) for each in self.pod.get("initContainers", [])]
        return [*inits, *(Container(each, is_init=False) for each in self.pod["containers"])]

    @property
    def ports(self) -> dict[str, int]:
        """Names and numbers of the ports of all containers."""
        return {each["name"]: each["containerPort"] for c in self.containers for each in c.raw.get("ports", [])}


def parse(rendered: str) -> list[Document]:
    return [each for each in yaml.load_all(rendered, Loader=_LOADER) if each]


def of_kind(documents: Sequence[Document], *kinds: str) -> list[Document]:
    return [each for each in documents if each["kind"] in kinds]


def workloads(documents: Sequence[Document]) -> list[Workload]:
    of_sets = [each for document in of_kind(documents, "LeaderWorkerSet") for each in pods_of_set(document)]
    return [Workload(each) for each in (*of_kind(documents, *WORKLOADS), *of_sets)]


def pods_of_set(document: Document) -> list[Document]:
    """Return a Deployment with the leader's pod of a LeaderWorkerSet, and one with that of its followers.

    Each has a selector for its own labels, as the LeaderWorkerSet itself needs none.
    """
    metadata, spec = document["metadata"], document["spec"]["leaderWorkerTemplate"]
    templates = {metadata["name"]: spec["leaderTemplate"], f"{metadata['name']}-follower": spec["workerTemplate"]}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**metadata, "name": name},
            "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
        }
        for name, template in templates.items()
    ]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects what has `labels`. An empty selector selects all."""
    if any(labels.get(name) != value for name, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", []):
        if each["operator"] != "In":
            raise ValueError(f"the operator {each['operator']} is not known here; write In")
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as the kubelet does: a name that is not set stays as it is."""
    return _REFERENCE.sub(lambda found: variables.get(found[1], found[0]), text)


def urls_in(command: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield host, port and path of each URL in a command."""
    for host, port, path in re.findall(r"http://([\w.]+):(\d+)(/[\w/]*)", " ".join(command)):
        yield host, int(port), path


def _value(
    variable: Mapping[str, Any],
    sources: Mapping[tuple[str, str], Mapping[str, str]],
    fields: Mapping[str, str],
    container: str,
) -> str:
    if "value" in variable:
        return str(variable["value"])
    origin = variable["valueFrom"]
    if "fieldRef" in origin:
        wanted, known = origin["fieldRef"]["fieldPath"], fields
    else:
        kind = "Secret" if "secretKeyRef" in origin else "ConfigMap"
        reference = origin["secretKeyRef" if kind == "Secret" else "configMapKeyRef"]
        wanted, known = reference["key"], sources.get((kind, reference["name"]), {})
    if wanted not in known:
        raise ValueError(f"container {container}: {variable['name']} is taken from {wanted}, which is not there")
    return known[wanted]
