"""The entry point of the `tandem` command."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command; if a library is missing, print how to install it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tandem: {' and '.join(missing)} missing; install the command with: pip install 'tandem-serve[cli]'")
    from tandem_client.cli.app import app

    app(prog_name="tandem")
