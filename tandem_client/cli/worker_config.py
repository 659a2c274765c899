"""What does a Worker's own configuration, the file that wrangler reads, say of it?

The file is wrangler.json, else wrangler.jsonc, else wrangler.toml, and is only read. What wrangler would set up beside
the Worker (stores, queues, other Workers) does not exist here, and is refused by name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import json5

from tandem_client.cli.worker_secrets import read_secrets

NAMES = ("wrangler.json", "wrangler.jsonc", "wrangler.toml")

# fmt: off
_DEPLOYMENT = frozenset({
    "$schema", "account_id", "base_dir", "compliance_region", "dev", "env", "find_additional_modules",
    "first_party_worker", "keep_names", "keep_vars", "legacy_env", "limits", "logpush", "migrations", "minify", "name",
    "no_bundle", "observability", "placement", "preserve_file_names", "preview_urls", "route", "routes", "send_metrics",
    "triggers", "tsconfig", "upload_source_maps", "workers_dev",
})
"""What matters to a deployment, or to wrangler itself, but not to the Worker as it runs here."""
_READ = frozenset(
    {"main", "compatibility_date", "compatibility_flags", "rules", "define", "alias", "assets", "vars", "ai"}
)
_OF_ONE_ENVIRONMENT = frozenset({"vars", "ai", "define"})
"""A named environment does not inherit bindings, and every key that is not read here counts as one."""
_ASSETS = frozenset({"directory", "binding", "run_worker_first"})
_ASSETS_AS_THEY_ARE = {"html_handling": "auto-trailing-slash", "not_found_handling": "none"}
"""What the assets here do anyway."""


class ConfigUnusable(ValueError):
    """This Worker cannot run here; the message names what is wrong, and the remedy."""


@dataclass(frozen=True)
class Assets:
    """Files that are served as they are."""

    directory: Path
    binding: str | None = None
    run_worker_first: bool = False


@dataclass(frozen=True)
class Rule:
    """Which files are modules of a kind: ESModule, Text, Data or CompiledWasm."""

    kind: str
    globs: tuple[str, ...]


@dataclass(frozen=True)
class WorkerConfig:
    """A Worker as it is to run here."""

    folder: Path
    path: Path
    main: Path | None
    compatibility_date: str
    compatibility_flags: tuple[str, ...] = ()
    ai_binding: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    assets: Assets | None = None
    rules: tuple[Rule, ...] = ()
    define: Mapping[str, str] = field(default_factory=dict)
    alias: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """What it asks for and does not get."""


def read_config(folder: Path, environment: str | None = None, *, ignore_unsupported: bool = False) -> WorkerConfig:
    """Return what `folder`'s file says; raises ConfigUnusable."""
    folder = folder.resolve()
    path = _find(folder)
    said = _of_environment(path, _parse(path), environment)
    unsupported = _unsupported(said)
    if unsupported and not ignore_unsupported:
        raise ConfigUnusable(
            f"{path} asks for {', '.join(unsupported)}, which there is not here; take it out, or go on without it with "
            "--ignore-unsupported"
        )
    main, assets = said.get("main"), _assets(folder, said.get("assets"))
    if main is None and assets is None:
        raise ConfigUnusable(f"{path} names no main and no assets; there is nothing to run")
    if main is not None and not (folder / main).is_file():
        raise ConfigUnusable(f"{path} has main = {main!r}, and there is no such file")
    if not isinstance(date := said.get("compatibility_date"), str):
        raise ConfigUnusable(f'{path} has no compatibility_date; add one, such as "2026-11-01"')
    ai = said.get("ai") or {}
    return WorkerConfig(
        folder=folder,
        path=path,
        main=None if main is None else (folder / main).resolve(),
        compatibility_date=date,
        compatibility_flags=tuple(said.get("compatibility_flags", ())),
        ai_binding=ai.get("binding"),
        variables={**(said.get("vars") or {}), **_secrets(folder, environment)},
        assets=assets,
        rules=tuple(Rule(rule["type"], tuple(rule["globs"])) for rule in said.get("rules", ())),
        define=said.get("define") or {},
        alias=said.get("alias") or {},
        ignored=tuple(unsupported),
    )


def _find(folder: Path) -> Path:
    for name in NAMES:
        if (folder / name).is_file():
            return folder / name
    raise ConfigUnusable(f"{folder} has none of {', '.join(NAMES)}; give the folder of a Worker")


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        said = tomllib.loads(text) if path.suffix == ".toml" else json5.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ConfigUnusable(f"{path} is not an object")
    return said


def _of_environment(path: Path, said: dict[str, Any], environment: str | None) -> dict[str, Any]:
    if environment is None:
        return said
    named = said.get("env") or {}
    if environment not in named:
        raise ConfigUnusable(f"{path} has no environment {environment!r}; it has {', '.join(sorted(named)) or 'none'}")
    inherited = (_READ | _DEPLOYMENT) - _OF_ONE_ENVIRONMENT
    return {**{key: value for key, value in said.items() if key in inherited}, **named[environment]}


def _unsupported(said: Mapping[str, Any]) -> list[str]:
    """Return what there is not here, an empty list or table of which asks for nothing."""
    nothing: tuple[Any, ...] = ([], {}, None, False)
    found = [key for key, value in said.items() if key not in _READ | _DEPLOYMENT and value not in nothing]
    assets = said.get("assets") or {}
    for key, value in assets.items():
        known = key in _ASSETS or value == _ASSETS_AS_THEY_ARE.get(key)
        if not known or (key == "run_worker_first" and not isinstance(value, bool)):
            found.append(f"assets.{key} = {value!r}")
    return found


def _secrets(folder: Path, environment: str | None) -> dict[str, str]:
    try:
        return read_secrets(folder, environment)
    except (OSError, ValueError) as error:
        raise ConfigUnusable(f"the file of secrets cannot be read: {error}") from error


def _assets(folder: Path, said: Mapping[str, Any] | None) -> Assets | None:
    if not said:
        return None
    directory = said.get("directory")
    if not directory or not (folder / directory).is_dir():
        raise ConfigUnusable(f"assets.directory is {directory!r}, and there is no such folder; build the assets first")
    return Assets((folder / directory).resolve(), said.get("binding"), said.get("run_worker_first") is True)
