"""Counts lines, classes and import edges of a checkout's product code. Pure: source files in, numbers out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_NOT_PRODUCT = ("tests/", "benchmarks/", "demo_model/", "engine/demo/", "tandem_engine/demo/", "protos/", "examples/")
_SKIPPED = {".venv", "build", "node_modules", "__pycache__"}


def product_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of the product: without tests, benchmarks, the demo model's makers and generated code."""
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if not inner.as_posix().startswith(_NOT_PRODUCT) and not _SKIPPED & set(inner.parts):
            yield path


def count_lines(root: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in product_files(root))


def count_classes(root: Path) -> int:
    trees = (ast.parse(path.read_text()) for path in product_files(root))
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def count_import_edges(root: Path, package: str) -> int:
    """Return the number of (module, imported module) pairs within a package, TYPE_CHECKING imports included."""
    paths = {_module(path.relative_to(root)): path for path in product_files(root)}
    modules = {name: path for name, path in paths.items() if name == package or name.startswith(f"{package}.")}
    return sum(len(_imported(path, set(modules)) - {name}) for name, path in modules.items())


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {node.module}
    return found & modules
