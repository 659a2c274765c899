"""How does the Worker's own esbuild make its modules of TypeScript and packages, and when has it to?"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig
from tandem_client.cli.worker_modules import BUILT_IN, BY_SUFFIX, KINDS, Module, MustBundle, as_they_are, kind_of
from tandem_client.cli.worker_npm import find_program, with_parents
from tandem_client.cli.worker_packages import NODE_MODULES
from tandem_client.cli.worker_source_map import SourceMap

_LOADERS = {"esModule": "js", "text": "text", "data": "copy", "wasm": "copy", "json": "json"}
_BUNDLE_SECONDS = 60
_NODE_REQUIRE_DATE = "2024-09-23"
_REQUIRE = (
    b'import { createRequire as tandemCreateRequire } from "node:module";\nconst require = tandemCreateRequire("/");\n'
)
"""CommonJS in a bundle asks for modules of Node.js with a `require` that a Worker has not."""
_ADVICE = re.compile(r"\n\n  You can mark the path.*?(?=\n\n|\Z)", re.DOTALL)


def modules_of(config: WorkerConfig) -> list[Module]:
    """Return the Worker's modules, its main one first; raises ConfigUnusable."""
    assert config.main is not None, "a Worker of assets alone has no modules"
    esbuild = _esbuild(config.folder)
    try:
        if config.define or config.alias or config.tsconfig or config.jsx:
            raise MustBundle(f"{config.path.name} has define, alias, tsconfig or jsx_factory")
        return as_they_are(config, config.main, may_bundle=esbuild is not None)
    except MustBundle as why:
        if esbuild is None:
            raise ConfigUnusable(
                f"{why}, so the Worker has to be bundled, and esbuild is not installed: run "
                f"`npm install --save-dev esbuild` in {config.folder}"
            ) from why
        return _bundled(config, config.main, esbuild)


def _bundled(config: WorkerConfig, main: Path, esbuild: Path) -> list[Module]:
    with tempfile.TemporaryDirectory(prefix="tandem-bundle-") as folder:
        command = [str(esbuild), str(main), f"--outdir={folder}", *_flags(config)]
        try:
            done = subprocess.run(
                command, cwd=config.folder, capture_output=True, text=True, timeout=_BUNDLE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigUnusable(f"esbuild took longer than {_BUNDLE_SECONDS} s over {main}") from error
        if done.returncode != 0:
            said = _ADVICE.sub("", done.stderr.strip())
            raise ConfigUnusable(f"esbuild could not bundle {main.relative_to(config.folder)}:\n{said}")
        return list(_read(config, Path(folder)))


def _read(config: WorkerConfig, folder: Path) -> Iterator[Module]:
    """Yield what esbuild has written: the bundle, and the files that are modules of their own."""
    bundle = (folder / "index.js").read_bytes()
    before = _REQUIRE if b"__require(" in bundle and _has_node_modules(config) else b""
    text = (folder / "index.js.map").read_text(encoding="utf-8")
    source_map = SourceMap(text, folder.resolve(), config.folder, before.count(b"\n"))
    yield Module("index.js", "esModule", before + bundle, source_map=source_map)
    for path in sorted(folder.iterdir()):
        if path.name not in ("index.js", "index.js.map"):
            yield Module(path.name, kind_of(config, path.name), path.read_bytes())


def _flags(config: WorkerConfig) -> list[str]:
    loaders = {suffix: _LOADERS[kind] for suffix, kind in BY_SUFFIX.items()} | _loaders_of_rules(config)
    built_in = {name: f"node:{name}" for name in NODE_MODULES} if "nodejs_compat" in config.compatibility_flags else {}
    return [
        *("--bundle", "--format=esm", "--target=es2022", "--entry-names=index", "--asset-names=[name]-[hash]"),
        *("--sourcemap=external", "--sources-content=false"),
        *("--log-level=error", "--color=false", "--conditions=workerd,worker,browser"),
        *(f"--external:{name}*" for name in BUILT_IN),
        *(f"--loader:{suffix}={loader}" for suffix, loader in loaders.items()),
        *(f"--define:{name}={value}" for name, value in config.define.items()),
        *(f"--alias:{name}={value}" for name, value in {**built_in, **config.alias}.items()),
        *(f"--jsx-{name}={value}" for name, value in config.jsx.items()),
        *([f"--tsconfig={config.tsconfig}"] if config.tsconfig else []),
    ]


def _has_node_modules(config: WorkerConfig) -> bool:
    flags = config.compatibility_flags
    is_new = config.compatibility_date >= _NODE_REQUIRE_DATE or "nodejs_compat_v2" in flags
    return is_new and any(flag.startswith("nodejs_compat") for flag in flags)


def _loaders_of_rules(config: WorkerConfig) -> dict[str, str]:
    suffixes = {}
    for rule in config.rules:
        for glob in rule.globs:
            if rule.kind in KINDS and (found := re.fullmatch(r"(?:\*\*/)?\*(\.\w+)", glob)):
                suffixes[found[1]] = _LOADERS[KINDS[rule.kind]]
    return suffixes


def _esbuild(folder: Path) -> Path | None:
    """Return the nearest esbuild that npm has installed for this Worker; wrangler brings one."""
    patterns = ("@esbuild/*/bin/esbuild", "*/node_modules/@esbuild/*/bin/esbuild", ".bin/esbuild")
    # The program itself, which needs no Node.js, before npm's wrapper around it.
    return next((found for pattern in patterns if (found := find_program(with_parents(folder), pattern))), None)
