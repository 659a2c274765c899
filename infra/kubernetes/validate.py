"""Renders and checks the manifests of every overlay: `python -m infra.kubernetes.validate`. Exit code 0: all hold."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.kubernetes.checks import check_workload
from infra.kubernetes.links import check_links
from infra.kubernetes.manifests import Document, of_kind, parse, workloads
from infra.kubernetes.tools import FOLDER, ROOT, MissingTool, check_custom, check_schemas, render

MANIFESTS = ROOT / "infra" / "kubernetes"
OVERLAYS = sorted(path.parent for path in (MANIFESTS / "overlays").glob("*/kustomization.yaml"))
OPTIONAL = ("encode",)
"""Components that no overlay has; they are checked over `production`."""


def main() -> int:
    try:
        problems = [f"{name}: {each}" for name, text in rendered() for each in validate(text)]
    except MissingTool as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def rendered() -> Iterator[tuple[str, str]]:
    """Yield the name and the YAML of each overlay, and of `production` with each optional component."""
    for folder in (MANIFESTS / "base", *OVERLAYS):
        yield folder.name, render(folder)
    for name in OPTIONAL:
        with with_component(name) as folder:
            yield f"production with {name}", render(folder)


def validate(text: str) -> list[str]:
    """Return the problems of rendered manifests. Raises MissingTool."""
    documents = parse(text)
    return [*check_schemas(text), *check_custom(documents), *check(documents)]


def check(documents: list[Document]) -> list[str]:
    """Return the problems that no schema finds."""
    found = [each for workload in workloads(documents) for each in check_workload(workload, documents, version())]
    return [*found, *check_links(documents), *_namespace(documents)]


def version() -> str:
    """Return the version of the package, which is the tag of the images."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@contextmanager
def with_component(name: str) -> Iterator[Path]:
    """Make an overlay as an operator does: `production` with one more component."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        up = "../../../infra/kubernetes"
        (Path(made) / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: tandem\n"
            f"resources: [{up}/overlays/production]\n"
            f"components: [{up}/components/{name}, {up}/components/release]\n"
        )
        yield Path(made)


def _namespace(documents: list[Document]) -> Iterator[str]:
    """All objects lie in one namespace, in which pods are restricted."""
    [namespace] = of_kind(documents, "Namespace")
    if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace does not enforce restricted pod security"
    for each in documents:
        if each is not namespace and each["metadata"].get("namespace") != namespace["metadata"]["name"]:
            yield f"{each['kind']} {each['metadata']['name']} is in the namespace {each['metadata'].get('namespace')}"


if __name__ == "__main__":
    sys.exit(main())
