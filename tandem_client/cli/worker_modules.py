"""Which modules is a Worker made of, as workerd takes them?

JavaScript that imports its own files is taken as it is. The Worker's own esbuild bundles TypeScript and packages.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig

_KINDS = {"ESModule": "esModule", "Text": "text", "Data": "data", "CompiledWasm": "wasm"}
_BY_SUFFIX = {
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
_LOADERS = {"esModule": "js", "text": "text", "data": "copy", "wasm": "copy", "json": "json"}
_NEEDS_BUNDLING = (".ts", ".tsx", ".mts", ".jsx")
_BUILT_IN = ("cloudflare:", "node:", "workerd:")
_COMMENT = re.compile(r"/\*.*?\*/|(?<!:)//[^\n]*", re.DOTALL)
_IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["']([^"'\n]+)["']""")
_BUNDLE_SECONDS = 60


@dataclass(frozen=True)
class Module:
    """One module; `kind` is workerd's word: esModule, text, data, wasm or json."""

    name: str
    kind: str
    content: bytes


class _MustBundle(Exception):
    """Says why the sources cannot be taken as they are."""


def modules_of(config: WorkerConfig) -> list[Module]:
    """Return the Worker's modules, its main one first; raises ConfigUnusable."""
    assert config.main is not None, "a Worker of assets alone has no modules"
    try:
        if config.define or config.alias:
            raise _MustBundle(f"{config.path.name} has define or alias")
        return list(_as_they_are(config, config.main, set()))
    except _MustBundle as why:
        return _bundled(config, config.main, str(why))


def _as_they_are(config: WorkerConfig, path: Path, seen: set[Path]) -> Iterator[Module]:
    """Yield a module and those that it imports."""
    seen.add(path)
    if not path.is_relative_to(config.folder):
        raise _MustBundle(f"{path} is outside {config.folder}")
    if path.suffix in _NEEDS_BUNDLING:
        raise _MustBundle(f"{path.name} is TypeScript or JSX")
    name, content = path.relative_to(config.folder).as_posix(), path.read_bytes()
    kind = _kind(config, name)
    yield Module(name, kind, content)
    for specifier in _imports(content) if kind == "esModule" else []:
        if specifier.startswith(_BUILT_IN):
            continue
        imported = (path.parent / specifier).resolve()
        if not specifier.startswith(("./", "../")) or not imported.is_file():
            raise _MustBundle(f"{name} imports {specifier!r}, which is none of its own files")
        if imported not in seen:
            yield from _as_they_are(config, imported, seen)


def _imports(content: bytes) -> list[str]:
    return _IMPORT.findall(_COMMENT.sub("", content.decode("utf-8", errors="replace")))


def _kind(config: WorkerConfig, name: str) -> str:
    for rule in config.rules:
        if rule.kind in _KINDS and any(_matches(name, glob) for glob in rule.globs):
            return _KINDS[rule.kind]
    kind = _BY_SUFFIX.get(PurePosixPath(name).suffix)
    if kind is None:
        raise ConfigUnusable(f"{name} is imported, and no rule says what it is; add one to {config.path.name}")
    return kind


def _matches(name: str, glob: str) -> bool:
    """Whether a path fits `*.html`, `**/*.html` or `src/*.txt`; `**/` is any number of folders, none included."""
    pattern = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(pattern, name) is not None


def _bundled(config: WorkerConfig, main: Path, why: str) -> list[Module]:
    esbuild = _esbuild(config, why)
    loaders = {suffix: _LOADERS[kind] for suffix, kind in _BY_SUFFIX.items()} | _loaders_of_rules(config)
    with tempfile.TemporaryDirectory(prefix="tandem-bundle-") as folder:
        command = [
            *(str(esbuild), str(main), "--bundle", "--format=esm", "--target=es2022", f"--outdir={folder}"),
            *("--entry-names=index", "--asset-names=[name]-[hash]", "--log-level=warning", "--color=false"),
            *("--conditions=workerd,worker,browser", *(f"--external:{name}*" for name in _BUILT_IN)),
            *(f"--loader:{suffix}={loader}" for suffix, loader in loaders.items()),
            *(f"--define:{name}={value}" for name, value in config.define.items()),
            *(f"--alias:{name}={value}" for name, value in config.alias.items()),
        ]
        try:
            done = subprocess.run(
                command, cwd=config.folder, capture_output=True, text=True, timeout=_BUNDLE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigUnusable(f"esbuild took longer than {_BUNDLE_SECONDS} s over {main}") from error
        if done.returncode != 0:
            raise ConfigUnusable(f"esbuild could not bundle {main}:\n{done.stderr.strip()}")
        others = sorted(path for path in Path(folder).iterdir() if path.name != "index.js")
        return [_module_of(config, path) for path in (Path(folder) / "index.js", *others)]


def _module_of(config: WorkerConfig, path: Path) -> Module:
    return Module(path.name, _kind(config, path.name), path.read_bytes())


def _loaders_of_rules(config: WorkerConfig) -> dict[str, str]:
    suffixes = {}
    for rule in config.rules:
        for glob in rule.globs:
            if rule.kind in _KINDS and (found := re.fullmatch(r"(?:\*\*/)?\*(\.\w+)", glob)):
                suffixes[found[1]] = _LOADERS[_KINDS[rule.kind]]
    return suffixes


def _esbuild(config: WorkerConfig, why: str) -> Path:
    """Return the nearest esbuild that npm has installed for this Worker."""
    for folder in (config.folder, *config.folder.parents):
        if (path := folder / "node_modules" / ".bin" / "esbuild").exists():
            return path
    raise ConfigUnusable(
        f"{why}, so the Worker has to be bundled, and esbuild is not installed: run "
        f"`npm install --save-dev esbuild` in {config.folder}"
    )
