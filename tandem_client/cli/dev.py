"""Runs a Cloudflare Worker with the wrangler in its own node_modules, and sends its `env.AI` to Tandem.

This module finds the programs and owns the process. `dev.mjs`, beside it, bundles, runs and reloads the Worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from tandem_client.connection import Connection

_SCRIPT = Path(__file__).with_name("dev.mjs")
_CONFIG_NAMES = ("wrangler.json", "wrangler.jsonc", "wrangler.toml")
_OLDEST_WRANGLER = (4, 86)
_TIMEOUT_SECONDS = 2.0
_MAX_NAMES = 3
_OFFLINE = {
    "WRANGLER_SEND_METRICS": "false",
    "WRANGLER_SEND_ERROR_REPORTS": "false",
    "WRANGLER_HIDE_BANNER": "true",  # the banner asks for updates
    "CLOUDFLARE_CF_FETCH_ENABLED": "false",
}


class CannotRun(Exception):
    """A program or file that `tandem dev` needs is missing; the message names it and the remedy."""


@dataclass(frozen=True)
class DevOptions:
    """The flags of `tandem dev`."""

    folder: Path
    connection: Connection
    port: int = 8787
    """0: a free port."""
    environment: str | None = None


def dev(options: DevOptions) -> int:
    """Run the Worker until SIGINT, SIGTERM or SIGHUP, and return the exit code; raises CannotRun."""
    command = [_program(options.folder), str(_SCRIPT), _script_arguments(options)]
    print(f"Tandem      {options.connection.base_url}  {gateway_state(options.connection)}", flush=True)
    environment = {**os.environ, **_OFFLINE, "PWD": str(options.folder)}
    if options.connection.token:
        environment["TANDEM_TOKEN"] = options.connection.token
    # The script has a session of its own, so that Ctrl-C in a terminal reaches this process only. The script ends when
    # its stdin closes, and therefore also when this process is killed.
    with subprocess.Popen(
        command, cwd=options.folder, env=environment, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: _end(process))
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the script has left, if it died


def gateway_state(connection: Connection) -> str:
    """Ask the gateway for its models; return their names, or one sentence on what is wrong with the remedy."""
    options = connection.models_options
    try:
        with httpx.Client(timeout=_TIMEOUT_SECONDS, **connection.client_options) as client:
            response = client.send(client.build_request(**options))
        if response.status_code in (401, 403):
            return "requires a token: set TANDEM_TOKEN"
        models = [str(model["id"]) for model in response.raise_for_status().json()["data"]]
    except httpx.TransportError:
        return "does not answer yet: run `tandem up`, or give --gateway URL"
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        return "answers, but is not Tandem; check --gateway"
    if not models:
        return "has no model loaded yet"
    others = len(models) - _MAX_NAMES
    return ", ".join(models[:_MAX_NAMES]) + (f" and {others} more" if others > 0 else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the script end at the first signal; kill it at the second."""
    assert process.stdin is not None
    if process.stdin.closed:
        process.kill()
    process.stdin.close()


def _program(folder: Path) -> str:
    """Return the path of Node.js: from npm's package `node`, else from PATH; raises CannotRun for what is missing."""
    if not any((folder / name).is_file() for name in _CONFIG_NAMES):
        raise CannotRun(f"{folder} has none of {', '.join(_CONFIG_NAMES)}; give the folder of a Cloudflare Worker")
    wrangler = _in_node_modules(folder, "wrangler/package.json")
    if wrangler is None:
        raise CannotRun(f"wrangler is not installed; run: npm install --save-dev wrangler   (in {folder})")
    version = str(json.loads(wrangler.read_text(encoding="utf-8"))["version"])
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST_WRANGLER:
        oldest = ".".join(map(str, _OLDEST_WRANGLER))
        raise CannotRun(
            f"wrangler {version} is too old, tandem dev needs {oldest} or newer; "
            f"run: npm install --save-dev wrangler@latest   (in {folder})"
        )
    node = _in_node_modules(folder, ".bin/node")
    if found := str(node) if node else shutil.which("node"):
        return found
    raise CannotRun("Node.js is not installed; wrangler needs it: https://nodejs.org")


def _in_node_modules(folder: Path, name: str) -> Path | None:
    """Return the file of that name in the nearest node_modules, as Node.js looks for packages."""
    paths = (parent / "node_modules" / name for parent in (folder, *folder.parents))
    return next((path for path in paths if path.exists()), None)


def _script_arguments(options: DevOptions) -> str:
    return json.dumps(
        {
            "port": options.port,
            "environment": options.environment,
            "gateway": options.connection.base_url,
            "proxyPath": f"/client/v4/accounts/{quote(options.connection.account, safe='')}/ai/run/proxy",
        }
    )
