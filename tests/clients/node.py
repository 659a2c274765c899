"""Runs what npm has installed for tests: scripts in Node.js, a bundled Worker, wrangler."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
BIN = FOLDER / "node_modules" / ".bin"


def require_clients() -> None:
    """Skip the test if `make services` has not installed the clients; fail if skips are not allowed."""
    if shutil.which("node") and (BIN / "esbuild").exists():
        return
    reason = f"the Node.js clients are not installed: {BIN} is missing; run `make services`"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def output_of(script: str, *arguments: str) -> Any:
    """Run a script of this folder and return the JSON that it prints."""
    require_clients()
    command = ["node", str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{script} failed:\n{done.stderr}"
    return json.loads(done.stdout)


def bundled_worker(into: Path) -> Path:
    """Bundle tests/clients/worker with its libraries; return the folder that workerd can serve."""
    require_clients()
    shutil.copy(FOLDER / "worker" / "config.capnp", into)
    flags = ["--bundle", "--format=esm", "--conditions=workerd,worker,browser", "--external:node:*"]
    bundle = f"--outfile={into / 'bundle.js'}"
    command = [str(BIN / "esbuild"), str(FOLDER / "worker" / "index.js"), *flags, bundle, "--log-level=warning"]
    subprocess.run(command, check=True, timeout=60)
    return into


@contextmanager
def wrangler_dev(api_base_url: str, account: str, home: Path) -> Iterator[Path]:
    """Run `wrangler dev` over a project, with variables that name the gateway; yield its log, which contains its URL.

    wrangler writes its own files to `home`.
    """
    require_clients()
    project = home / "project"
    shutil.copytree(FOLDER / "wrangler", project)
    environment = os.environ | {
        "CLOUDFLARE_API_BASE_URL": api_base_url,
        "CLOUDFLARE_API_TOKEN": "unused",
        "CLOUDFLARE_ACCOUNT_ID": account,
        "WRANGLER_SEND_METRICS": "false",
        "HOME": str(home),
    }
    command = [str(BIN / "wrangler"), "dev", "--ip", "127.0.0.1", "--port", "0", "--inspector-port", "0"]
    log = home / "wrangler.log"
    with log.open("wb") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        with subprocess.Popen(command, cwd=project, env=environment, start_new_session=True, **streams) as process:
            try:
                yield log
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def url_in(log: Path) -> str | None:
    """Return the URL in wrangler's log, or None until wrangler is ready."""
    ready = re.search(r"Ready on (http://\S+)", log.read_text(errors="replace"))
    return ready[1] if ready else None
