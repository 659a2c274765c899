"""Which modules is a Worker made of, as workerd takes them?

JavaScript that imports its own files is taken as it is. Packages of npm are bundled where npm has installed esbuild,
else taken as they are too; TypeScript and JSX need it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path, PurePosixPath

from tandem_client.cli import worker_packages
from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig
from tandem_client.cli.worker_source_map import SourceMap

KINDS = {"ESModule": "esModule", "Text": "text", "Data": "data", "CompiledWasm": "wasm"}
BY_SUFFIX = {
    ".js": "esModule",
    ".mjs": "esModule",
    ".txt": "text",
    ".html": "text",
    ".sql": "text",
    ".bin": "data",
    ".wasm": "wasm",
    ".json": "json",
}
"""What wrangler takes files for without any rule."""
BUILT_IN = ("cloudflare:", "node:", "workerd:")
_NEEDS_BUNDLING = (".ts", ".tsx", ".mts", ".jsx")
_COMMENT = re.compile(r"/\*.*?\*/|(?<!:)//[^\n]*", re.DOTALL)
_IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["']([^"'\n]+)["']""")
_REQUIRE = re.compile(r"""\brequire\(\s*["']([^"'\n]+)["']\s*\)""")


@dataclass(frozen=True)
class Module:
    """One module; `kind` is workerd's word: esModule, commonJsModule, text, data, wasm or json."""

    name: str
    kind: str
    content: bytes
    exports: tuple[str, ...] = ()
    """The names that others may import from CommonJS."""
    source_map: SourceMap | None = None
    """Of a bundle."""


class MustBundle(Exception):
    """Says why the sources cannot be taken as they are."""


@dataclass(frozen=True)
class _File:
    path: Path
    kind: str
    content: bytes


@dataclass(frozen=True)
class _Link:
    """What a module calls another by, where that is not the way to its file."""

    importer: _File
    specifier: str
    target: _File | str
    """A file, or the module of Node.js that is meant."""


def as_they_are(config: WorkerConfig, main: Path, *, may_bundle: bool) -> list[Module]:
    """Return the main module and what it imports; raises MustBundle, or ConfigUnusable for what is not there."""
    collected = _Collector(config, may_bundle)
    collected.take(main)
    return list(collected.modules())


def kind_of(config: WorkerConfig, name: str) -> str:
    """Return what kind of module a file is, by the rules; raises ConfigUnusable."""
    for rule in config.rules:
        if rule.kind in KINDS and any(_matches(name, glob) for glob in rule.globs):
            return KINDS[rule.kind]
    kind = BY_SUFFIX.get(PurePosixPath(name).suffix)
    if kind is None:
        raise ConfigUnusable(f"{name} is imported, and no rule says what it is; add one to {config.path.name}")
    return kind


class _Collector:
    def __init__(self, config: WorkerConfig, may_bundle: bool) -> None:
        self._config = config
        self._may_bundle = may_bundle
        self._files: dict[Path, _File] = {}
        self._links: list[_Link] = []

    def take(self, path: Path) -> _File:
        """Take a file and all that it imports."""
        if path in self._files:
            return self._files[path]
        if path.suffix in _NEEDS_BUNDLING:
            raise MustBundle(f"{path.name} is TypeScript or JSX")
        file = self._files[path] = _File(path, self._kind(path), path.read_bytes())
        for specifier in _imports(file):
            if not specifier.startswith(BUILT_IN) and (found := self._found(path, specifier)) is not None:
                self._links.append(_Link(file, specifier, found))
        return file

    def _kind(self, path: Path) -> str:
        if _is_packaged(path) and path.suffix in (".js", ".cjs"):
            return "commonJsModule" if worker_packages.is_commonjs(path) else "esModule"
        return kind_of(self._config, self._shown(path))

    def _found(self, importer: Path, specifier: str) -> _File | str | None:
        """Return what a specifier means; None: in a package, where it may be anything that looks like an import."""
        exact = (importer.parent / specifier).resolve()
        is_own, is_path = not _is_packaged(importer), specifier.startswith(("./", "../"))
        if is_path and exact.is_file():
            return self.take(exact)
        if is_own and is_path and any(Path(f"{exact}{suffix}").is_file() for suffix in _NEEDS_BUNDLING):
            raise MustBundle(f"{self._shown(importer)} imports {specifier!r}, which is TypeScript or JSX")
        if is_own and not is_path and self._may_bundle:
            raise MustBundle(f"{self._shown(importer)} imports {specifier!r}")
        if specifier in worker_packages.NODE_MODULES and "nodejs_compat" in self._config.compatibility_flags:
            return f"node:{specifier}"
        try:
            return self.take(worker_packages.resolve(specifier, importer.parent))
        except worker_packages.NotFound as why:
            if not is_own:
                return None
            shown = f"{self._shown(importer)} imports {specifier!r}"
            raise ConfigUnusable(f"{shown}, and there is no such file" if is_path else f"{shown}, and {why}") from why

    def modules(self) -> Iterator[Module]:
        """Yield the modules, and one that passes on another for each name that is not the way to a file."""
        root = Path(commonpath([self._config.folder, *(path.parent for path in self._files)]))
        names = {path: path.relative_to(root).as_posix() for path in self._files}
        for file in self._files.values():
            exports = worker_packages.exports_of(file.content) if file.kind == "commonJsModule" else ()
            yield Module(names[file.path], file.kind, file.content, exports)
        made = set(names.values())
        for link in self._links:
            name = posixpath.normpath(posixpath.join(posixpath.dirname(names[link.importer.path]), link.specifier))
            if name not in made:
                made.add(name)
                target = link.target if isinstance(link.target, str) else f"/{names[link.target.path]}"
                yield _passing_on(json.dumps(target), name, link.importer.kind)

    def _shown(self, path: Path) -> str:
        folder = self._config.folder
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _passing_on(target: str, name: str, kind: str) -> Module:
    """Return a module for importers of a kind that exports what another does."""
    # Whether that has a default is not known, and to pass on one that is not there would be an error.
    esm = f"import * as all from {target};\nexport * from {target};\nexport default all.default;\n"
    text = f"module.exports = require({target});\n" if kind == "commonJsModule" else esm
    return Module(name, kind, text.encode())


def _is_packaged(path: Path) -> bool:
    return "node_modules" in path.parts


def _imports(file: _File) -> list[str]:
    pattern = {"esModule": _IMPORT, "commonJsModule": _REQUIRE}.get(file.kind)
    return pattern.findall(_COMMENT.sub("", file.content.decode("utf-8", errors="replace"))) if pattern else []


def _matches(name: str, glob: str) -> bool:
    """Whether a path fits `*.html`, `**/*.html` or `src/*.txt`; `**/` is any number of folders, none included."""
    pattern = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(pattern, name) is not None
