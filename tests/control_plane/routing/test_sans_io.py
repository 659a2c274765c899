"""Routing is decided by the clock and the generator that it is given; import-linter holds what it imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import control_plane.routing

MODULES = sorted(Path(control_plane.routing.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_clocks_are_defaults_of_parameters_and_chance_has_a_seed_unless_nobody_gives_one(module: Path) -> None:
    tree = ast.parse(module.read_text())
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    defaults = {default for each in functions for default in (*each.args.defaults, *each.args.kw_defaults)}
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("time", "random")
    ]
    clocks = [node for node in used if ast.unparse(node) != "random.Random"]
    assert {ast.unparse(node) for node in clocks} <= {"time.monotonic"} and set(clocks) <= defaults
    unseeded = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.BoolOp) and "random.Random()" in ast.unparse(node)
    ]
    assert unseeded in ([], ["rng or random.Random()"])
    assert ast.unparse(tree).count("random.Random()") == len(unseeded)
