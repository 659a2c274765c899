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

from tandem_client.cli.worker_assets import Assets, read_assets, unknown_settings
from tandem_client.cli.worker_config_shape import complaints
from tandem_client.cli.worker_secrets import read_secrets

NAMES = ("wrangler.json", "wrangler.jsonc", "wrangler.toml")

# fmt: off
_DEPLOYMENT = frozenset({
    "$schema", "account_id", "base_dir", "compliance_region", "dev", "env", "find_additional_modules",
    "first_party_worker", "keep_names", "keep_vars", "legacy_env", "limits", "logpush", "migrations", "minify", "name",
    "no_bundle", "observability", "placement", "preserve_file_names", "preview_urls", "route", "routes", "send_metrics",
    "streaming_tail_consumers", "tail_consumers", "triggers", "upload_source_maps", "workers_dev",
})
"""What matters to a deployment, or to wrangler itself, but not to the Worker as it runs here."""
_BUNDLING = frozenset({"define", "alias", "tsconfig", "jsx_factory", "jsx_fragment"})
_READ = _BUNDLING | {"main", "compatibility_date", "compatibility_flags", "rules", "assets", "vars", "ai", "secrets"}
_OF_ONE_ENVIRONMENT = frozenset({"vars", "ai", "define", "secrets", "tail_consumers", "streaming_tail_consumers"})
"""A named environment does not inherit bindings, and every key that is not read here counts as one."""


class ConfigUnusable(ValueError):
    """This Worker cannot run here; the message names what is wrong, and the remedy."""


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
    tsconfig: str | None = None
    jsx: Mapping[str, str] = field(default_factory=dict)
    """`factory` and `fragment`, as esbuild's flags call them."""
    name: str = ""
    secrets: frozenset[str] = frozenset()
    """Those of the variables that come from a file of secrets."""
    ignored: tuple[str, ...] = ()
    """What it asks for and does not get."""
    notes: tuple[str, ...] = ()
    """What its author should know, and does not stop it."""


def read_config(folder: Path, environment: str | None = None, *, ignore_unsupported: bool = False) -> WorkerConfig:
    """Return what `folder`'s file says; raises ConfigUnusable."""
    folder = folder.resolve()
    path = _find(folder)
    said = _checked(path, _of_environment(path, _checked(path, _parse(path)), environment))
    unsupported = _unsupported(said)
    if unsupported and not ignore_unsupported:
        raise ConfigUnusable(
            f"{path.name} asks for what there is not here: {', '.join(unsupported)}\n"
            "take it out, or go on without it: --ignore-unsupported"
        )
    main = said.get("main")
    if main is None and not said.get("assets"):
        raise ConfigUnusable(f"{path} names no main and no assets; there is nothing to run")
    if main is not None and not (folder / main).is_file():
        raise ConfigUnusable(f"{path} has main = {main!r}, and there is no such file")
    if main is not None and main.endswith(".py"):
        raise ConfigUnusable(f"{path} has main = {main!r}: Python does not run here, JavaScript and TypeScript do")
    if not isinstance(date := said.get("compatibility_date"), str):
        raise ConfigUnusable(f'{path} has no compatibility_date; add one, such as "2026-11-01"')
    flags = tuple(said.get("compatibility_flags", ()))
    assets = _assets(folder, said, date, flags)
    secrets, missing = _secrets(folder, environment, said.get("secrets"))
    ai = said.get("ai") or {}
    return WorkerConfig(
        folder=folder,
        path=path,
        main=None if main is None else (folder / main).resolve(),
        compatibility_date=date,
        compatibility_flags=flags,
        ai_binding=ai.get("binding"),
        variables={**(said.get("vars") or {}), **secrets},
        assets=assets,
        rules=tuple(Rule(rule["type"], tuple(rule["globs"])) for rule in said.get("rules", ())),
        define=said.get("define") or {},
        alias=said.get("alias") or {},
        tsconfig=said.get("tsconfig"),
        jsx={key.removeprefix("jsx_"): said[key] for key in ("jsx_factory", "jsx_fragment") if said.get(key)},
        name=said.get("name") or folder.name,
        secrets=frozenset(secrets),
        ignored=tuple(unsupported),
        notes=(*missing, *(assets.notes if assets else ())),
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


def _checked(path: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Return what is said, nulls left out; raises ConfigUnusable for a value of another kind than its setting takes."""
    said = {name: value for name, value in said.items() if value is not None}
    if wrong := list(complaints(said)):
        raise ConfigUnusable("\n".join(f"{path}: {each}" for each in wrong))
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
    known = _READ | _DEPLOYMENT
    found = [_with_names(key, value) for key, value in said.items() if key not in known and value not in nothing]
    return [*found, *unknown_settings(said.get("assets") or {})]


def _with_names(key: str, value: Any) -> str:
    """Return "kv_namespaces (CACHE, USERS)": the key and what the Worker would call its bindings."""
    if isinstance(value, dict):
        value = next((each for each in value.values() if isinstance(each, list)), [value])  # durable_objects.bindings
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    names = [str(name) for item in items if (name := item.get("binding") or item.get("name"))]
    return f"{key} ({', '.join(names)})" if names else key


def _secrets(folder: Path, environment: str | None, said: Any) -> tuple[dict[str, str], list[str]]:
    """Return the secrets that are declared (all, where none is), and what is to be said of those that are missing."""
    try:
        found = read_secrets(folder, environment)
    except (OSError, ValueError) as error:
        raise ConfigUnusable(f"the file of secrets cannot be read: {error}") from error
    if not isinstance(said, dict) or not isinstance(required := said.get("required"), list):
        return found, []
    missing = [f"the secret {name} is missing: add {name}=... to .dev.vars" for name in required if name not in found]
    return {name: value for name, value in found.items() if name in required}, missing


def _assets(folder: Path, said: Mapping[str, Any], date: str, flags: tuple[str, ...]) -> Assets | None:
    if not said.get("assets"):
        return None
    try:
        return read_assets(folder, said["assets"], date, flags)
    except ValueError as error:
        raise ConfigUnusable(str(error)) from error
