"""What does `tandem worker dev` tell its user: where the Worker is, what answers it, what became of a change?"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from rich.console import Console
from rich.text import Text

from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import WorkerConfig
from tandem_client.wire import is_loopback

_MAX_NAMES = 3
_LOOK_SECONDS = 2.0


class View:
    """Prints lines; each note once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._noted: tuple[str, ...] = ()

    async def started(self, config: WorkerConfig, port: int, upstream: Upstream) -> None:
        """Tell what runs; asks the gateway what it serves."""
        rows: list[tuple[str, Text]] = [(config.name, Text(f"http://127.0.0.1:{port}", "bold cyan"))]
        if config.ai_binding is not None:
            rows.append((f"env.{config.ai_binding}", await _answered_by(upstream)))
        if config.assets is not None:
            rows.append(("assets", Text(_short(config, str(config.assets.directory)))))
        if config.variables:
            rows.append(("variables", Text(", ".join(_variable(name, config) for name in config.variables))))
        width = max(len(name) for name, _ in rows)
        for name, what in rows:
            self._print(Text.assemble((f"{name:<{width}}", "bold"), "  ", what))
        self._tell_notes(config)
        self._print(Text("What you edit is loaded at once. Ctrl-C ends it.", "dim"))

    def reloaded(self, names: Sequence[str], config: WorkerConfig) -> None:
        self._print(Text.assemble(("reloaded", "green"), "  ", _some(names)))
        self._tell_notes(config)

    def failed(self, names: Sequence[str], why: str) -> None:
        self._print(Text.assemble(("not loaded", "red"), "  ", _some(names)))
        for line in why.splitlines():
            self._print(Text(f"  {line}"))
        self._print(Text("What ran before goes on.", "dim"))

    def _tell_notes(self, config: WorkerConfig) -> None:
        without = [f"goes on without {', '.join(config.ignored)}"] if config.ignored else []
        notes = (*without, *config.notes)
        for note in notes:
            if note not in self._noted:
                self._print(Text.assemble(("note", "yellow"), "  ", note))
        self._noted = notes

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


async def _answered_by(upstream: Upstream) -> Text:
    headers = {"authorization": f"Bearer {upstream.token}"} if upstream.token else {}
    url = Text(upstream.url)
    try:
        async with httpx.AsyncClient(trust_env=not is_loopback(upstream.url), timeout=_LOOK_SECONDS) as client:
            answer = await client.get(f"{upstream.url}/v1/models", headers=headers)
        if answer.status_code in (401, 403):
            return url.append("  wants a token: set TANDEM_TOKEN", "yellow")
        models = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
    except httpx.TransportError:
        return url.append("  nothing answers there yet: run `tandem up`, or say --gateway URL", "yellow")
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        return url.append("  answers, but not as Tandem does; is it the right --gateway?", "yellow")
    return url.append(f"  {_some(models)}" if models else "  has no model loaded yet", "" if models else "yellow")


def _variable(name: str, config: WorkerConfig) -> str:
    return f"{name} (secret)" if name in config.secrets else name


def _short(config: WorkerConfig, path: str) -> str:
    return path.removeprefix(f"{config.folder}/")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
