"""The simulator draws from generators with a seed, and asks no clock; import-linter holds what it imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import control_plane.simulator

MODULES = sorted(Path(control_plane.simulator.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_chance_has_a_seed_and_no_clock_is_asked(module: Path) -> None:
    tree = ast.parse(module.read_text())
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert {name for name in used if name.startswith("random.")} <= {"random.Random"}
    assert not {name for name in used if name.endswith((".now", ".utcnow", ".today"))} - {"self.now"}
    unseeded = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "random.Random" and not node.args
    ]
    assert unseeded == []
