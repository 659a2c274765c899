"""Which file does `import "some-package/part"` mean, by the rules of Node.js?

https://nodejs.org/api/packages.html, with the conditions that wrangler sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem_client.cli.worker_npm import with_parents

_CONDITIONS = frozenset({"workerd", "worker", "browser", "import", "module", "default"})
_SUFFIXES = ("", ".js", ".mjs", ".cjs", ".json", "/index.js", "/index.mjs", "/index.cjs")
_IS_MODULE = re.compile(rb"^\s*(?:import\b|export\b)|[;}]\s*(?:export|import)\s*[{*d\"']", re.MULTILINE)
_IS_COMMONJS = re.compile(rb"\bmodule\.exports\b|\bexports\.\w|\brequire\(")
_EXPORTED = re.compile(
    rb"""\bexports\.([A-Za-z_$][\w$]*)\s*=|\bdefineProperty\(exports,\s*["']([A-Za-z_$][\w$]*)["']"""
)
_NOTED = re.compile(rb"\b0\s*&&\s*\(module\.exports\s*=\s*\{([^}]*)\}")
_NAME = re.compile(rb"[A-Za-z_$][\w$]*")
# fmt: off
NODE_MODULES = frozenset({
    "assert", "async_hooks", "buffer", "child_process", "cluster", "console", "constants", "crypto", "dgram",
    "diagnostics_channel", "dns", "domain", "events", "fs", "http", "http2", "https", "inspector", "module", "net",
    "os", "path", "perf_hooks", "process", "punycode", "querystring", "readline", "repl", "stream", "string_decoder",
    "sys", "timers", "tls", "tty", "url", "util", "v8", "vm", "wasi", "worker_threads", "zlib",
})
# fmt: on
"""Modules of Node.js that may be imported without `node:` before their names."""


class NotFound(Exception):
    """Says which package or part of one is missing."""


def resolve(specifier: str, folder: Path) -> Path:
    """Return the file that `specifier` means to a module in `folder`; raises NotFound."""
    if specifier.startswith((".", "/")):
        return _file(folder / specifier, specifier)
    scope, _, rest = specifier.partition("/")
    name, _, part = rest.partition("/") if scope.startswith("@") else (scope, "", rest)
    package = f"{scope}/{name}" if scope.startswith("@") else scope
    for parent in with_parents(folder):
        if (root := parent / "node_modules" / package).is_dir():
            return _in_package(root, f"./{part}" if part else ".", specifier)
    raise NotFound(f"{package} is not installed: run `npm install {package}`")


def is_commonjs(path: Path) -> bool:
    """Return whether a file of a package is CommonJS, and no JavaScript module."""
    content = path.read_bytes()
    return path.suffix == ".cjs" or (_IS_MODULE.search(content) is None and _IS_COMMONJS.search(content) is not None)


def exports_of(content: bytes) -> tuple[str, ...]:
    """Return the names that CommonJS says it exports, as far as its text shows: assignments, and compilers' notes."""
    assigned = [one or other for one, other in _EXPORTED.findall(content)]
    names = [*assigned, *(name for note in _NOTED.findall(content) for name in _NAME.findall(note))]
    return tuple(sorted({name.decode() for name in names} - {"default", "__esModule"}))


def _in_package(root: Path, part: str, specifier: str) -> Path:
    try:
        said = json.loads((root / "package.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotFound(f"{root}/package.json cannot be read: {error}") from error
    if (exports := said.get("exports")) is not None:
        target = _exported(exports, part)
        if target is None:
            raise NotFound(f"{specifier} is nothing that its package exports to a Worker")
        return _file(root / target, specifier)
    if part != ".":
        return _file(root / part, specifier)
    browser = said.get("browser")
    main = said.get("module") or (browser if isinstance(browser, str) else None) or said.get("main") or "index.js"
    return _file(root / main, specifier)


def _exported(exports: Any, part: str) -> str | None:
    """Return the file of a part that a package's `exports` name, of the first condition that holds."""
    has_parts = isinstance(exports, dict) and any(key.startswith(".") for key in exports)
    if not has_parts:
        return _target(exports) if part == "." else None
    if part in exports:
        return _target(exports[part])
    for pattern in sorted((key for key in exports if "*" in key), key=len, reverse=True):
        before, _, after = pattern.partition("*")
        if part.startswith(before) and part.endswith(after) and len(part) >= len(before) + len(after):
            target = _target(exports[pattern])
            return target and target.replace("*", part[len(before) : len(part) - len(after)])
    return None


def _target(said: Any) -> str | None:
    if isinstance(said, str):
        return said
    if isinstance(said, list):
        return next((target for each in said if (target := _target(each))), None)
    if isinstance(said, Mapping):
        return next((target for key, each in said.items() if key in _CONDITIONS and (target := _target(each))), None)
    return None


def _file(path: Path, specifier: str) -> Path:
    for suffix in _SUFFIXES:
        if (found := Path(f"{path}{suffix}")).is_file():
            return found.resolve()
    raise NotFound(f"{specifier} is no file of its package")
