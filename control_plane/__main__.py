"""`python -m control_plane`: run a control-plane process.

`account ...` makes accounts, `fleet ...` admits machines, `migrate ...` shows, migrates and takes back the tables,
`replay ...` simulates a fleet, `trace ...` writes what was asked as a trace.
"""

from __future__ import annotations

import sys

from control_plane.account_command import main as account_command
from control_plane.fleet_command import main as fleet_command
from control_plane.migrate_command import main as migrate_command
from control_plane.replay_command import main as replay_command
from control_plane.settings import ControlPlaneSettings
from control_plane.start import serve
from control_plane.trace_command import main as trace_command
from tandem_runtime import lifecycle, log, metrics, tracing
from tandem_runtime.settings import load_settings


def main() -> int:
    commands = {
        "account": account_command,
        "fleet": fleet_command,
        "migrate": migrate_command,
        "replay": replay_command,
        "trace": trace_command,
    }
    if command := commands.get("".join(sys.argv[1:2])):
        log.configure("tandem-control", level="warning")
        return command(sys.argv[2:])
    settings = load_settings(ControlPlaneSettings, "control")
    log.configure("tandem-control", settings.log_json)
    tracing.configure("tandem-control", settings.otlp_endpoint or None)
    metrics.configure("tandem-control", settings.otlp_endpoint or None)
    return lifecycle.run(lambda drain: serve(settings, drain), settings.loop_stall_seconds)


if __name__ == "__main__":
    sys.exit(main())
