"""The commands in the runbooks, and on the page of dashboards, run as written, except for the addresses."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.alerts.scene import Scene
from tests.docs.markdown import ROOT

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.services, pytest.mark.timeout(120)]

_PAGES = sorted((ROOT / "docs/operate/runbooks").glob("*.md"))
_GATEWAY, _PROMETHEUS = "http://127.0.0.1:8642", "http://127.0.0.1:9090"
_FINDS_SOMETHING = {"tandem doctor": 1, f"curl -s '{_GATEWAY}/readyz?model=@tandem/demo'": 22}
"""Exit codes, beside 0, of commands that look for problems: 22 is an answer of 400 or above."""


def commands_of(page: Path) -> list[str]:
    [block] = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


@cache
def run_command(command: str, gateway: str, prometheus: str) -> str:
    here = command.replace(_GATEWAY, gateway).replace(_PROMETHEUS, prometheus)
    here = here.replace("curl -s", "curl -sS --fail-with-body")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TANDEM_BASE_URL": gateway, "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", here], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, _FINDS_SOMETHING.get(command)), f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
async def test_a_runbooks_commands_run_as_written(scene: Scene, page: Path) -> None:
    gateway, prometheus = scene.fleet.base_url, scene.prometheus.base_url
    commands = commands_of(page)
    assert len(commands) >= 3
    printed = [await asyncio.to_thread(run_command, command, gateway, prometheus) for command in commands]
    assert any(each.strip() for each in printed)


async def test_the_pages_check_of_an_installation_runs_as_written(scene: Scene) -> None:
    page = (ROOT / "docs/operate/dashboards.md").read_text()
    [block] = re.findall(r"^```\n(promtool .*?)^```", page, re.MULTILINE | re.DOTALL)
    gateway, prometheus = scene.fleet.base_url, scene.prometheus.base_url
    *_, printed = [await asyncio.to_thread(run_command, line, gateway, prometheus) for line in block.splitlines()]
    lines = printed.strip().splitlines()
    assert len(lines) == len(await scene.prometheus.query("up"))
    assert all(" => 1 " in line for line in lines)
