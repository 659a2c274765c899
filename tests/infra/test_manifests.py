"""The manifests are what Kubernetes takes and what the services take; the checks find what is wrong."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import yaml

from infra.kubernetes import tools
from infra.kubernetes.manifests import Document, parse
from infra.kubernetes.tools import MissingTool, check_custom, check_schemas, render
from infra.kubernetes.validate import MANIFESTS, OVERLAYS, check, rendered, version, with_component

_FILES = sorted(MANIFESTS.rglob("*.yaml"))
_NAMES = ["base", "cpu-demo", "gpu", "production", "several-hosts", "production with encode"]


@cache
def _rendered() -> dict[str, str]:
    return dict(rendered())


@contextmanager
def _skipped_where_missing() -> Iterator[None]:
    """Skip, with the reason, where a tool is not installed; fail if skips are not allowed."""
    try:
        yield
    except MissingTool as error:
        if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@cache
def _parsed(name: str) -> list[Document]:
    return parse(_rendered()[name])


@pytest.fixture
def manifests() -> dict[str, str]:
    """Return the overlays' YAML by name. Skips, with the reason, where there is no kubectl."""
    with _skipped_where_missing():
        return _rendered()


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_every_file_is_yaml_and_is_used(path: Any) -> None:
    documents = [each for each in yaml.safe_load_all(path.read_text()) if each]
    assert documents
    if path.name == "kustomization.yaml":
        assert documents[0]["kind"] == ("Component" if "components" in path.parts else "Kustomization")
    else:
        assert f"- {path.name}" in (path.parent / "kustomization.yaml").read_text().replace("path: ", "")


def test_images_and_labels_have_the_packages_version() -> None:
    release = yaml.safe_load((MANIFESTS / "components/release/kustomization.yaml").read_text())
    assert {each["newTag"] for each in release["images"]} == {version()}
    assert release["labels"][0]["pairs"]["app.kubernetes.io/version"] == version()


@pytest.mark.services
def test_every_overlay_is_rendered(manifests: dict[str, str]) -> None:
    assert list(manifests) == _NAMES
    assert {each.name for each in OVERLAYS} <= set(manifests)


@pytest.mark.services
@pytest.mark.parametrize("name", _NAMES)
def test_the_services_take_every_flag_variable_and_probe(manifests: dict[str, str], name: str) -> None:
    assert check(parse(manifests[name])) == []


@pytest.mark.services
@pytest.mark.parametrize("name", ["cpu-demo", "gpu", "several-hosts", "production with encode"])
def test_kubernetes_takes_every_object(manifests: dict[str, str], name: str) -> None:
    with _skipped_where_missing():
        assert check_schemas(manifests[name]) == []
        assert check_custom(parse(manifests[name])) == []


@pytest.mark.services
def test_the_schemas_refuse_what_kubernetes_would_refuse(manifests: dict[str, str]) -> None:
    text = manifests["production"]
    [route] = [deepcopy(each) for each in _parsed("production") if each["kind"] == "HTTPRoute"]
    route["spec"]["rules"][0]["timeouts"]["request"] = "soon"
    with _skipped_where_missing():
        found = check_schemas(text.replace("runAsNonRoot: true", "runAsNoRoot: true", 1))
        assert len(found) == len(tools.VERSIONS)
        assert all("'runAsNoRoot' was unexpected" in each for each in found)
        assert "timeouts/request must match pattern" in check_custom([route])[0]
        monitor = _object(_parsed("production"), "PodMonitor", "fleet")
        assert check_custom([{**monitor, "spec": {**monitor["spec"], "podMetricsEndpoints": "all"}}])
        rule = _object(_parsed("production"), "PrometheusRule", "tandem")
        assert check_custom([{**rule, "spec": {"groups": [{"rules": []}]}}])


@pytest.mark.services
def test_the_schemas_refuse_a_wrong_leaderworkerset_and_a_wrong_pod_in_it(manifests: dict[str, str]) -> None:
    text = manifests["several-hosts"]
    [made] = [deepcopy(each) for each in _parsed("several-hosts") if each["kind"] == "LeaderWorkerSet"]
    made["spec"]["leaderWorkerTemplate"] |= {"restartPolicy": "Never", "sizes": 2}
    with _skipped_where_missing():
        found = check_custom([made])
        assert len(found) == 2 and all("LeaderWorkerSet hosts" in each for each in found)
        assert any("'Never' is not one of" in each for each in found)
        assert any("'sizes' was unexpected" in each for each in found)
        spoiled = text.replace("serviceAccountName", "serviceAccounName")
        wrong = [each for each in check_schemas(spoiled) if "'serviceAccounName' was unexpected" in each]
        assert len(wrong) == 3 * len(tools.VERSIONS), "the gateway's pod, the leader's and the follower's"


def _set(documents: list[Document]) -> dict[str, Any]:
    template: dict[str, Any] = _object(documents, "LeaderWorkerSet", "hosts")["spec"]["leaderWorkerTemplate"]
    return template


def _first(documents: list[Document], template: str) -> dict[str, Any]:
    container: dict[str, Any] = _set(documents)[template]["spec"]["containers"][0]
    return container


_MISTAKES_OF_HOSTS: list[tuple[str, Callable[[list[Document]], object]]] = [
    ("must begin with --nnodes 3", lambda made: _set(made).update(size=3)),
    (
        "followers are killed before their leader has drained",
        lambda made: _set(made)["workerTemplate"]["spec"].update(terminationGracePeriodSeconds=30),
    ),
    (
        "hosts may not call hosts-follower on port 29501",
        lambda made: _object(made, "NetworkPolicy", "hosts")["spec"]["egress"].clear(),
    ),
    (
        "hosts takes calls of other namespaces on port 29501",
        lambda made: _object(made, "NetworkPolicy", "hosts")["spec"]["ingress"][0].pop("from"),
    ),
    (
        "--engine vllm needs the Python interpreter",
        lambda made: _first(made, "leaderTemplate").update(
            image=f"tandem/decode:{version()}-cuda", args=["--engine=vllm", *_first(made, "leaderTemplate")["args"]]
        ),
    ),
    (
        "the image is tandem/decode:latest",
        lambda made: _first(made, "workerTemplate").update(image="tandem/decode:latest"),
    ),
    (
        "unrecognized arguments: --leaders=x",
        lambda made: _first(made, "workerTemplate")["args"].append("--leaders=x"),
    ),
]


@pytest.mark.services
@pytest.mark.parametrize(("problem", "spoil"), _MISTAKES_OF_HOSTS, ids=[each[0] for each in _MISTAKES_OF_HOSTS])
def test_a_mistake_in_a_leaderworkerset_is_found(
    manifests: dict[str, str], problem: str, spoil: Callable[[list[Document]], object]
) -> None:
    documents = deepcopy(_parsed("several-hosts"))
    spoil(documents)
    assert any(problem in each for each in check(documents)), check(documents)


def _pod(documents: list[Document], name: str) -> dict[str, Any]:
    [found] = [each for each in documents if each["metadata"]["name"] == name and "template" in each.get("spec", {})]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def _container(documents: list[Document], name: str) -> dict[str, Any]:
    container: dict[str, Any] = _pod(documents, name)["containers"][0]
    return container


def _object(documents: list[Document], kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in documents if each["kind"] == kind and each["metadata"]["name"].startswith(name)]
    return dict(found)


_MISTAKES: list[tuple[str, Callable[[list[Document]], object]]] = [
    (
        "unrecognized arguments: --drain-second=9",
        lambda made: _container(made, "decode")["args"].append("--drain-second=9"),
    ),
    (
        "no setting has the variable TANDEM_MODELS",
        lambda made: _container(made, "decode")["env"].append({"name": "TANDEM_MODELS", "value": "x"}),
    ),
    ("there is no ConfigMap", lambda made: made.remove(_object(made, "ConfigMap", "tandem"))),
    ("securityContext.runAsNonRoot is None", lambda made: _pod(made, "decode")["securityContext"].pop("runAsNonRoot")),
    (
        "securityContext is {'readOnlyRootFilesystem': True}",
        lambda made: _container(made, "decode").update(securityContext={"readOnlyRootFilesystem": True}),
    ),
    (
        "must be more than preStop and drain, 150 s",
        lambda made: _pod(made, "decode").update(terminationGracePeriodSeconds=150),
    ),
    ("a gateway needs a preStop sleep", lambda made: _container(made, "gateway").pop("lifecycle")),
    (
        "the gateway has no /ready",
        lambda made: _container(made, "gateway")["readinessProbe"]["httpGet"].update(path="/ready"),
    ),
    (
        "without --alive it ends a process",
        lambda made: _container(made, "decode")["livenessProbe"]["exec"]["command"].remove("--alive"),
    ),
    (
        "before it can say why",
        lambda made: _container(made, "decode")["livenessProbe"].update(timeoutSeconds=5),
    ),
    ("the image is tandem/decode:latest", lambda made: _container(made, "decode").update(image="tandem/decode:latest")),
    (
        "belong together",
        lambda made: _container(made, "decode")["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
    ),
    (
        "it listens on [8652, 8672] beyond loopback, and declares []",
        lambda made: _container(made, "decode").pop("ports"),
    ),
    (
        "its selector selects no pod",
        lambda made: _object(made, "Service", "gateway-fleet")["spec"].update(selector={"app": "gateway"}),
    ),
    (
        "gateway has no port https",
        lambda made: _object(made, "Service", "gateway-fleet")["spec"]["ports"][0].update(targetPort="https"),
    ),
    (
        "it must publish addresses that are not ready",
        lambda made: _object(made, "Service", "gateway-fleet")["spec"].pop("publishNotReadyAddresses"),
    ),
    ("and 3 gateways are", lambda made: _object(made, "StatefulSet", "gateway")["spec"].update(replicas=3)),
    (
        "there is no port 80 of a Service gateway",
        lambda made: _object(made, "HTTPRoute", "gateway")["spec"]["rules"][0]["backendRefs"][0].update(port=80),
    ),
    (
        "a rule has timeout, which is not known",
        lambda made: _object(made, "HTTPRoute", "gateway")["spec"]["rules"][0].update(timeout="9s"),
    ),
    (
        "prefill may not call gateway on port 8644",
        lambda made: _object(made, "NetworkPolicy", "workers")["spec"]["egress"][0]["ports"].pop(),
    ),
    (
        "gateway may not call another namespace on port 5432",
        lambda made: made.remove(_object(made, "NetworkPolicy", "postgresql")),
    ),
    (
        "gateway takes calls of other namespaces on port 8643",
        lambda made: _object(made, "NetworkPolicy", "gateway")["spec"]["ingress"][0].pop("ports"),
    ),
    (
        "does not enforce restricted pod security",
        lambda made: _object(made, "Namespace", "tandem")["metadata"].update(labels={}),
    ),
    ("there is no PersistentVolumeClaim", lambda made: made.remove(_object(made, "PersistentVolumeClaim", "models"))),
    (
        "0 endpoints read the port kv-metrics of decode",
        lambda made: _object(made, "PodMonitor", "fleet")["spec"]["podMetricsEndpoints"].pop(0),
    ),
    (
        "decode takes no call of Prometheus on port 8672",
        lambda made: made.remove(_object(made, "NetworkPolicy", "metrics")),
    ),
    (
        "gateway takes calls of Prometheus on port 8643",
        lambda made: _object(made, "NetworkPolicy", "metrics")["spec"]["ingress"][0].pop("ports"),
    ),
    (
        "which restricted pod security refuses",
        lambda made: _pod(made, "decode")["volumes"].append({"name": "x", "hostPath": {"path": "/run"}}),
    ),
]


@pytest.mark.services
@pytest.mark.parametrize(("problem", "spoil"), _MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_found(manifests: dict[str, str], problem: str, spoil: Callable[[list[Document]], object]) -> None:
    documents = deepcopy(_parsed("production"))
    spoil(documents)
    assert any(problem in each for each in check(documents)), check(documents)


@pytest.mark.services
def test_an_overlay_with_a_component_that_is_not_there_is_refused(manifests: dict[str, str]) -> None:
    with (
        with_component("encoder") as folder,
        pytest.raises(ValueError, match="encoder"),
    ):
        render(folder)


@pytest.mark.services
def test_a_kubectl_that_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tools, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="run `make services`"):
        render(MANIFESTS / "base")
    old = tmp_path / "kubectl"
    old.write_text('#!/bin/sh\necho \'{"clientVersion": {"major": "1", "minor": "20+"}}\'\n')
    old.chmod(0o755)
    with pytest.raises(MissingTool, match=r"1\.27"):
        render(MANIFESTS / "base")


@pytest.mark.parametrize("code", [0, 1])
def test_join_tokens_prints_a_secret_with_all_roles_or_nothing(tmp_path: Any, code: int) -> None:
    """Its output goes to `kubectl apply`, which would apply a part."""
    made = tmp_path / "exec"
    made.write_text(f'#!/bin/sh\necho "token  tdj1.$7"\n[ "$7" != encode ] || exit {code}\n')
    made.chmod(0o755)
    done = subprocess.run(
        [str(MANIFESTS / "join-tokens.sh")],
        env={"PATH": os.environ["PATH"], "EXEC": str(made)},
        capture_output=True,
        text=True,
        check=False,
    )
    if code:
        assert (done.returncode, done.stdout) == (1, "")
        return
    secret = yaml.safe_load(done.stdout)
    assert secret["metadata"] == {"name": "tandem-join", "namespace": "tandem"}
    assert secret["stringData"] == {role: f"tdj1.{role}" for role in ("kv", "prefill", "decode", "encode")}
