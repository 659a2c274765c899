"""Checks what connects the manifests' objects: selectors, ports, names, monitors, and what network policies permit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.kubernetes.manifests import Document, Workload, of_kind, pods_of_set, selects, workloads

_WORKERS = ("prefill", "decode", "encode", "node")
_PORTS = {"prefill": (8650, 8651), "decode": (8650, 8652), "encode": (8653,), "node": (8650, 8651, 8652)}
"""Ports of a pod that gateways dial."""
_DNS = 53
_HTTP = 8642
_FOLLOWERS_CALL = 29501
"""The first of the ports between the hosts of one engine; the others are any."""
_POSTGRES = 5432
_CLIENTS = {"tandem-http": "true"}
"""The label of namespaces whose pods may call the gateway."""
_KUBERNETES = {"kubernetes.io/metadata.name": "kube-system"}
"""The label of the namespace with the names' service; databases lie anywhere."""
_PROMETHEUS = {"tandem-metrics": "true"}
"""The label of namespaces whose pods may read metrics."""
_METRICS = range(8670, 8675)
_ROUTE_KEYS = {"parentRefs", "hostnames", "rules"}
_RULE_KEYS = {"backendRefs", "timeouts", "matches", "filters", "name"}


def check_links(documents: Sequence[Document]) -> list[str]:
    """Return the problems between objects."""
    return [
        *_selectors(documents),
        *_services(documents),
        *_routes(documents),
        *_gateway_names(documents),
        *check_policies(documents),
        *_hosts(documents),
        *_claims(documents),
        *check_monitors(documents),
    ]


def _selectors(documents: Sequence[Document]) -> Iterator[str]:
    """A selector selects something; a workload's own pods, for one."""
    found = workloads(documents)
    for workload in found:
        if not selects(workload.raw["spec"]["selector"], workload.labels):
            yield f"{workload.kind} {workload.name}: its selector does not select its own pods"
    chosen = [(each, each["spec"]["selector"]) for each in of_kind(documents, "PodDisruptionBudget")]
    chosen += [(each, each["spec"]["podSelector"]) for each in of_kind(documents, "NetworkPolicy")]
    chosen += [(each, {"matchLabels": each["spec"]["selector"]}) for each in of_kind(documents, "Service")]
    for document, selector in chosen:
        if not any(selects(selector, workload.labels) for workload in found):
            yield f"{document['kind']} {document['metadata']['name']}: its selector selects no pod"


def _services(documents: Sequence[Document]) -> Iterator[str]:
    for service in of_kind(documents, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        for workload in (each for each in workloads(documents) if selects(selector, each.labels)):
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in {*workload.ports, *workload.ports.values()}:
                    name = service["metadata"]["name"]
                    yield f"Service {name}: {workload.name} has no port {port['targetPort']}"


def _routes(documents: Sequence[Document]) -> Iterator[str]:
    """Routes lead to ports of services. Keys are compared here: the schema of the Gateway API permits any."""
    services = {each["metadata"]["name"]: each for each in of_kind(documents, "Service")}
    for route in of_kind(documents, "HTTPRoute"):
        name = route["metadata"]["name"]
        for unknown in set(route["spec"]) - _ROUTE_KEYS:
            yield f"HTTPRoute {name}: spec has {unknown}, which is not known"
        for rule in route["spec"]["rules"]:
            for unknown in set(rule) - _RULE_KEYS:
                yield f"HTTPRoute {name}: a rule has {unknown}, which is not known"
            for backend in rule["backendRefs"]:
                service = services.get(backend["name"])
                if service is None or backend["port"] not in [each["port"] for each in service["spec"]["ports"]]:
                    yield f"HTTPRoute {name}: there is no port {backend['port']} of a Service {backend['name']}"


def _gateway_names(documents: Sequence[Document]) -> Iterator[str]:
    """Variables name each gateway once, by the name that its StatefulSet and its headless Service give it."""
    sets = {each["metadata"]["name"]: each for each in of_kind(documents, "StatefulSet")}
    if "gateway" not in sets:
        return
    spec = sets["gateway"]["spec"]
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    if services.get(spec["serviceName"], {}).get("clusterIP") != "None":
        yield f"StatefulSet gateway: there is no headless Service {spec['serviceName']}"
    elif not services[spec["serviceName"]].get("publishNotReadyAddresses"):
        yield f"Service {spec['serviceName']}: it must publish addresses that are not ready, or no worker ever joins"
    namespace = sets["gateway"]["metadata"]["namespace"]
    hosts = [f"gateway-{number}.{spec['serviceName']}.{namespace}.svc" for number in range(spec["replicas"])]
    values: dict[str, str] = {}
    for each in of_kind(documents, "ConfigMap"):
        values |= each["data"]
    for name, port in (
        ("TANDEM_CONTROL", 8643),
        ("TANDEM_CONTROL_REPLICAS", 8643),
        ("TANDEM_CONTROL_ENROLMENT_ADVERTISE", 8644),
    ):
        if values.get(name) != (wanted := ",".join(f"{host}:{port}" for host in hosts)):
            yield f"{name} is {values.get(name)}, and {spec['replicas']} gateways are {wanted}"


def _hosts(documents: Sequence[Document]) -> Iterator[str]:
    """A LeaderWorkerSet has as many pods as its engine has hosts, and followers that outlive their leader's drain."""
    for document in of_kind(documents, "LeaderWorkerSet"):
        name, size = document["metadata"]["name"], document["spec"]["leaderWorkerTemplate"]["size"]
        leader, follower = (Workload(each) for each in pods_of_set(document))
        words = [word for container in leader.containers for word in " ".join(container.raw["args"]).split()]
        if words.count("--engine-args=--nnodes") != 1 or words[words.index("--engine-args=--nnodes") + 1] != str(size):
            yield f"LeaderWorkerSet {name}: its leader's --engine-args must begin with --nnodes {size}, its size"
        if follower.pod["terminationGracePeriodSeconds"] < leader.pod["terminationGracePeriodSeconds"]:
            yield f"LeaderWorkerSet {name}: followers are killed before their leader has drained"


def _claims(documents: Sequence[Document]) -> Iterator[str]:
    claims = {each["metadata"]["name"] for each in of_kind(documents, "PersistentVolumeClaim")}
    accounts = {each["metadata"]["name"] for each in of_kind(documents, "ServiceAccount")}
    for workload in workloads(documents):
        for volume in workload.pod.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in claims:
                yield f"{workload.kind} {workload.name}: there is no PersistentVolumeClaim {claim}"
        if (account := workload.pod.get("serviceAccountName")) not in accounts:
            yield f"{workload.kind} {workload.name}: there is no ServiceAccount {account}"


# ------------------------------------------------------------------------------------------------- monitors


def check_monitors(documents: Sequence[Document]) -> Iterator[str]:
    """Yield what Prometheus would not find, or not reach. Without monitors there is nothing to check."""
    monitors, policies = of_kind(documents, "PodMonitor"), of_kind(documents, "NetworkPolicy")
    if not monitors:
        return
    for workload in workloads(documents):
        ports = {name: port for name, port in workload.ports.items() if name.endswith("-metrics")}
        chosen = [each["spec"] for each in monitors if selects(each["spec"]["selector"], workload.labels)]
        scraped = [endpoint["port"] for spec in chosen for endpoint in spec["podMetricsEndpoints"]]
        for name, port in ports.items():
            if scraped.count(name) != 1:
                yield f"PodMonitor: {scraped.count(name)} endpoints read the port {name} of {workload.name}"
            if not _may_enter(policies, None, workload, port, _PROMETHEUS):
                yield f"NetworkPolicy: {workload.name} takes no call of Prometheus on port {port}"
        for port in set(workload.ports.values()) - set(ports.values()):
            if _may_enter(policies, None, workload, port, _PROMETHEUS):
                yield f"NetworkPolicy: {workload.name} takes calls of Prometheus on port {port}"


# ------------------------------------------------------------------------------------------------- policies


def check_policies(documents: Sequence[Document]) -> Iterator[str]:
    """Every connection that Tandem needs passes the policies on both sides; what nobody needs does not."""
    policies, found = of_kind(documents, "NetworkPolicy"), workloads(documents)
    for caller, called, port in _needed(found):
        if not _may_leave(policies, caller, called, port):
            yield f"NetworkPolicy: {_named(caller)} may not call {_named(called)} on port {port}"
        elif called is not None and not _may_enter(policies, caller, called, port):
            yield f"NetworkPolicy: {_named(called)} takes no call of {_named(caller)} on port {port}"
    for workload in found:
        for port in (8643, 8644, *range(8650, 8654), 8660, *_METRICS, _FOLLOWERS_CALL):
            if _may_enter(policies, None, workload, port):
                yield f"NetworkPolicy: {workload.name} takes calls of other namespaces on port {port}"


def _needed(found: Sequence[Workload]) -> Iterator[tuple[Workload | None, Workload | None, int]]:
    """Yield callers, whom they call, and ports. None: a client in another namespace, or a server beyond ours."""
    gateways = [each for each in found if each.component == "gateway"]
    workers = [each for each in found if each.component in _WORKERS]
    for gateway in gateways:
        yield None, gateway, _HTTP
        yield gateway, None, _DNS
        if any("secretRef" in each for each in gateway.pod["containers"][0].get("envFrom", [])):
            yield gateway, None, _POSTGRES
        for worker in workers:
            yield from ((worker, gateway, port) for port in (8643, 8644))
            yield from ((gateway, worker, port) for port in _PORTS[worker.component])
    with_kv = [each for each in workers if each.component != "encode"]
    hosts = [each for each in found if each.labels.get("tandem-hosts") == "true"]
    for one in hosts:
        yield one, None, _DNS
        yield from ((one, other, _FOLLOWERS_CALL) for other in hosts if other is not one)
    for worker in with_kv:
        yield worker, None, _DNS
        yield from ((worker, other, port) for other in with_kv for port in (8650, 8660))


def _may_leave(policies: Sequence[Document], caller: Workload | None, called: Workload | None, port: int) -> bool:
    if caller is None:
        return True
    return _permits(policies, "Egress", "egress", "to", caller, called, port, _KUBERNETES)


def _may_enter(
    policies: Sequence[Document],
    caller: Workload | None,
    called: Workload,
    port: int,
    namespace: Mapping[str, str] = _CLIENTS,
) -> bool:
    return _permits(policies, "Ingress", "ingress", "from", called, caller, port, namespace)


def _permits(
    policies: Sequence[Document],
    kind: str,
    rules: str,
    peers: str,
    own: Workload,
    other: Workload | None,
    port: int,
    namespace: Mapping[str, str],
) -> bool:
    """Return whether the policies on `own` permit a connection with `other`; without a policy all pass."""
    on_own = [
        each["spec"]
        for each in policies
        if kind in each["spec"]["policyTypes"] and selects(each["spec"]["podSelector"], own.labels)
    ]
    return not on_own or any(
        _has_port(rule, port) and _has_peer(rule.get(peers), other, namespace)
        for policy in on_own
        for rule in policy.get(rules, [])
    )


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    ports = rule.get("ports")
    return ports is None or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, other: Workload | None, namespace: Mapping[str, str]) -> bool:
    """Return whether a rule names `other`; None is a pod in a namespace with the labels `namespace`."""
    if peers is None:
        return True
    if other is not None:
        return any("namespaceSelector" not in each and selects(each["podSelector"], other.labels) for each in peers)
    return any("namespaceSelector" in each and selects(each["namespaceSelector"], namespace) for each in peers)


def _named(workload: Workload | None) -> str:
    return workload.name if workload is not None else "another namespace"
