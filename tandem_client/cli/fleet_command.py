"""`tandem fleet`: hands its arguments to the control plane's own command, which works on the database."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

HELP = "Say who belongs to the fleet: token, list, revoke, rotate-ca, backup, restore (on a gateway's machine)."


class NotInstalled(Exception):
    """The control plane is not installed on this machine."""


def fleet(arguments: Sequence[str]) -> int:
    """Run `python -m control_plane fleet ...` at this terminal; return its exit status. Raise NotInstalled."""
    if importlib.util.find_spec("control_plane") is None:
        raise NotInstalled(
            "`tandem fleet` needs the fleet's database and secret, and the control plane is not installed here; run it "
            "on a gateway's machine, or install tandem-serve[control]"
        )
    return subprocess.run([sys.executable, "-m", "control_plane", "fleet", *arguments], check=False).returncode
