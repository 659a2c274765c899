"""`tandem fleet` and `tandem trace`: hand their arguments to the control plane's commands that work on the database."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

HELP = "Say who belongs to the fleet: token, list, revoke, rotate-ca, backup, restore (on a gateway's machine)."


TRACE_HELP = "Write the requests that gateways have explained as a trace for `tandem replay` (on a gateway's machine)."


class NotInstalled(Exception):
    """The control plane is not installed on this machine."""


def fleet(arguments: Sequence[str]) -> int:
    """Run `python -m control_plane fleet ...` at this terminal; return its exit status. Raise NotInstalled."""
    return _run("fleet", arguments)


def trace(arguments: Sequence[str]) -> int:
    """Run `python -m control_plane trace ...` at this terminal; return its exit status. Raise NotInstalled."""
    return _run("trace", arguments)


def _run(command: str, arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("control_plane") is None:
        raise NotInstalled(
            f"`tandem {command}` needs the fleet's database, and the control plane is not installed here; run it "
            "on a gateway's machine, or install tandem-serve[control]"
        )
    return subprocess.run([sys.executable, "-m", "control_plane", command, *arguments], check=False).returncode
