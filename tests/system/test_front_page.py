"""The commands and the code of README.md and docs/python-client.md run as they stand, but for the address."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.fleet import Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8642"
README = (ROOT / "README.md").read_text()
CLIENT = (ROOT / "docs/python-client.md").read_text()


async def run(fleet: Fleet, command: list[str]) -> str:
    """Run a command with the fleet's address in place of the page's; return what it prints."""
    done = await asyncio.to_thread(
        subprocess.run,
        [part.replace(ADDRESS, fleet.base_url) for part in command],
        env={**os.environ, "TANDEM_BASE_URL": fleet.base_url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", README + CLIENT, re.MULTILINE | re.DOTALL))
async def test_the_python_code_answers(demo_fleet: Fleet, code: str) -> None:
    assert (await run(demo_fleet, [sys.executable, "-c", code])).strip()


async def test_the_curl_command_streams_an_event_per_token_in_the_form_shown(demo_fleet: Fleet) -> None:
    (command,) = re.findall(r"^```\n(curl .*?)^```", README, re.MULTILINE | re.DOTALL)
    events = (await run(demo_fleet, ["bash", "-c", command.replace("curl ", "curl --silent ")])).split("\n\n")
    assert events[0].startswith('data: {"response":"A","p":"')
    assert '"finish_reason":"stop","usage":{"prompt_tokens":16,"completion_tokens":55' in events[-3]
    assert events[-2] == "data: [DONE]"


@pytest.mark.parametrize("command", re.findall(r"`\.venv/bin/tandem ((?:run|status)[^`]*)`", README))
async def test_the_commands_of_the_terminal_work(demo_fleet: Fleet, command: str) -> None:
    assert (await run(demo_fleet, [sys.executable, "-m", "tandem_client.cli", *shlex.split(command)])).strip()
