"""Which configuration does workerd need to run a Worker whose env.AI is Tandem?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tandem_client.cli.worker_assets import Assets
from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig
from tandem_client.cli.worker_modules import Module

CONFIG = "config.capnp"
_ASSETS_DATE = "2026-01-01"
_AI_MODULE = "cloudflare-internal:ai-api"


@dataclass(frozen=True)
class Upstream:
    """Where env.AI's calls go, and as whom."""

    url: str
    token: str | None = None


def write(folder: Path, config: WorkerConfig, modules: Sequence[Module], upstream: Upstream) -> Path:
    """Write the configuration and what it embeds into `folder`, and return its path; raises ConfigUnusable.

    It has no address: workerd is given the socket. The token is in it: the folder must be its owner's alone.
    """
    for number, module in enumerate(modules):
        (folder / f"module-{number}").write_bytes(module.content)
    services = [
        _named("internet", 'network = (allow = ["public", "private"], tlsOptions = (trustBrowserCas = true))'),
        _named("tandem", f"external = {_external(upstream)}"),
    ]
    if config.main is not None:
        services.append(_named("worker", f"worker = {_worker(config, modules)}"))
    if config.assets is not None:
        (folder / "assets.js").write_bytes(
            resources.files("tandem_client.cli").joinpath("worker_assets.js").read_bytes()
        )
        services += _asset_services(config, config.assets)
    text = f"""using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [
    {_list(services)}
  ],
  sockets = [(name = "http", http = (), service = {_text(_entry(config))})],
);
"""
    path = folder / CONFIG
    path.write_text(text, encoding="utf-8")
    return path


def _entry(config: WorkerConfig) -> str:
    """Return the service that a browser's request comes to first."""
    if config.main is None:
        return "assets"
    return "assets-first" if config.assets is not None and not config.assets.worker_first else "worker"


def _worker(config: WorkerConfig, modules: Sequence[Module]) -> str:
    embedded = [_module(module, f"module-{number}") for number, module in enumerate(modules)]
    bindings = [*_ai_bindings(config), *_variables(config.variables)]
    if config.assets is not None and config.assets.binding:
        bindings.append(_named(config.assets.binding, 'service = "assets"'))
    flags = ", ".join(_text(flag) for flag in config.compatibility_flags)
    return f"""(
      modules = [{_list(embedded, 8)}],
      compatibilityDate = {_text(config.compatibility_date)},
      compatibilityFlags = [{flags}],
      bindings = [{_list(bindings, 8)}],
    )"""


def _module(module: Module, file: str) -> str:
    exports = f", namedExports = [{', '.join(map(_text, module.exports))}]" if module.exports else ""
    return _named(module.name, f"{module.kind} = embed {_text(file)}{exports}")


def _ai_bindings(config: WorkerConfig) -> list[str]:
    """Wire workerd's own AI module, as Cloudflare does, over a service of our choice."""
    if config.ai_binding is None:
        return []
    inner = f'wrapped = (moduleName = "{_AI_MODULE}", innerBindings = [(name = "fetcher", service = "tandem")])'
    return [_named(config.ai_binding, inner)]


def _variables(variables: Mapping[str, Any]) -> list[str]:
    return [
        _named(name, f"text = {_text(value)}" if isinstance(value, str) else f"json = {_text(json.dumps(value))}")
        for name, value in variables.items()
    ]


def _asset_services(config: WorkerConfig, assets: Assets) -> list[str]:
    given = [_named("DISK", 'service = "disk"'), _named("RULES", f"json = {_text(json.dumps(assets.rules()))}")]
    following = _named("NEXT", 'service = "worker"')
    made = [
        _named("disk", f"disk = (path = {_text(str(assets.directory))}, allowDotfiles = true)"),
        _named("assets", f"worker = {_assets_worker(given)}"),
    ]
    if _entry(config) == "assets-first":
        made.append(_named("assets-first", f"worker = {_assets_worker([*given, following])}"))
    return made


def _assets_worker(bindings: Sequence[str]) -> str:
    module = '(name = "assets.js", esModule = embed "assets.js")'
    return f'(modules = [{module}], compatibilityDate = "{_ASSETS_DATE}", bindings = [{", ".join(bindings)}])'


def _external(upstream: Upstream) -> str:
    address = urlsplit(upstream.url)
    if address.path not in ("", "/") or not address.hostname:
        raise ConfigUnusable(f"--gateway is {upstream.url}; give an address without a path, like http://127.0.0.1:8642")
    host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
    value = f"Bearer {upstream.token}"
    headers = f'injectRequestHeaders = [(name = "authorization", value = {_text(value)})]' if upstream.token else ""
    if address.scheme == "https":
        tls = f"tlsOptions = (trustBrowserCas = true), certificateHost = {_text(address.hostname)}"
        return f"(address = {_text(f'{host}:{address.port or 443}')}, https = (options = ({headers}), {tls}))"
    return f"(address = {_text(f'{host}:{address.port or 80}')}, http = ({headers}))"


def _named(name: str, what: str) -> str:
    return f"(name = {_text(name)}, {what})"


def _list(items: Iterable[str], indent: int = 4) -> str:
    return f",\n{' ' * indent}".join(items)


def _text(value: str) -> str:
    """Return a text as Cap'n Proto writes it: C's escapes for what would end it or the line."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    shown = (escapes.get(char) or (f"\\x{ord(char):02x}" if char < " " or char == "\x7f" else char) for char in value)
    return f'"{"".join(shown)}"'
