"""The code on the pages in docs/clients runs unchanged, except for the address."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.node import FOLDER, require_clients
from tests.system.fleet import Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGES = Path(__file__).parents[2] / "docs" / "clients"
ADDRESS = "http://127.0.0.1:8642"
BLOCKS = [
    pytest.param(language, code, id=f"{page.stem}-{number}")
    for page in sorted(PAGES.glob("*.md"))
    for number, (language, code) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S), 1)
    if language in ("python", "js", "sh")
]


def run(language: str, code: str) -> str:
    if language == "js":
        require_clients()
        command = ["node", "--input-type=module", "--eval", code]
    else:
        command = ["bash", "-euc", code] if language == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_there_is_code_to_run() -> None:
    assert len(BLOCKS) >= 10


@pytest.mark.parametrize(("language", "code"), BLOCKS)
async def test_the_pages_code_runs_and_prints_something(demo_fleet: Fleet, language: str, code: str) -> None:
    assert ADDRESS in code
    code = code.replace(ADDRESS, demo_fleet.base_url).replace("curl ", "curl --silent --show-error --fail ")
    assert (await asyncio.to_thread(run, language, code)).strip()
