"""Reads the variables that images set from infra/images/Dockerfile. A manifest may set others in their place."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

_DOCKERFILE = Path(__file__).resolve().parents[1] / "images" / "Dockerfile"
_STAGE = re.compile(r"FROM (\S+) AS (\S+)")


def image_variables(image: str) -> dict[str, str]:
    """Return the variables of `tandem/TARGET:TAG`, of TARGET-cuda if the tag ends so, or with -vllm; {} for others."""
    name, _, tag = image.removeprefix("tandem/").partition(":")
    kind = next((kind for kind in ("-cuda", "-vllm") if tag.endswith(kind)), "")
    target = f"{name}{kind}"
    found: dict[str, str] = {}
    parents, variables = _stages()
    while target in variables:
        found = {**variables[target], **found}
        target = parents[target]
    return found


@cache
def _stages() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return each stage's parent, and the variables that it sets itself."""
    parents: dict[str, str] = {}
    variables: dict[str, dict[str, str]] = {}
    stage = ""
    for line in _DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        if begins := _STAGE.fullmatch(line.strip()):
            parent, stage = begins.groups()
            parents[stage], variables[stage] = parent, {}
        elif line.startswith("ENV "):
            variables[stage] |= dict(word.split("=", 1) for word in shlex.split(line.removeprefix("ENV ")))
    return parents, variables
