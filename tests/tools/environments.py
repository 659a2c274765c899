"""Installs tools, each into a folder of its own: build/tools/NAME.

python -m tests.tools.environments

installs those that `make test` uses. This needs only Python's own library: no environment of ours is there yet.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.tools.catalogue import TOOLS, Tool

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tools"


def main() -> int:
    problems = 0
    for tool in TOOLS:
        if tool.is_small and (problem := install(tool)):
            print(f"{tool.name} is not installed: {problem}", file=sys.stderr)
            problems += 1
    return int(problems > 0)


def program(tool: Tool) -> Path | None:
    """Return the interpreter that runs the tool's task, or None if the tool is not installed as the catalogue says."""
    folder = FOLDER / tool.name
    if not _mark(folder).is_file() or _mark(folder).read_text() != _wanted(tool):
        return None
    return Path(shutil.which("node") or "node") if tool.is_node else folder / "bin" / "python"


def install(tool: Tool) -> str:
    """Install a tool unless it is there; return why it cannot be installed, or ""."""
    if program(tool) is not None:
        return ""
    print(f"installing {tool.name}", flush=True)
    folder = FOLDER / tool.name
    shutil.rmtree(folder, ignore_errors=True)
    if tool.is_node:
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel", "error"]
    else:
        venv.create(folder, with_pip=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *tool.packages], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1][:200]
    _mark(folder).write_text(_wanted(tool))
    return ""


def version(tool: Tool) -> str:
    """Return the tool's version, as the catalogue pins it."""
    package = tool.packages[0]
    return package.rpartition("@")[2] if tool.is_node else package.rpartition("==")[2]


def _mark(folder: Path) -> Path:
    return folder / ".installed"


def _wanted(tool: Tool) -> str:
    return "\n".join(tool.packages)


if __name__ == "__main__":
    sys.exit(main())
