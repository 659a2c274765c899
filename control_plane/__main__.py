"""`python -m control_plane`: run a control-plane process, or `account ...` to make accounts; see --help."""

from __future__ import annotations

import sys

from control_plane.account_command import main as account_command
from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from tandem_runtime import lifecycle, log, metrics, tracing
from tandem_runtime.settings import load_settings


def main() -> int:
    if sys.argv[1:2] == ["account"]:
        log.configure("tandem-control", level="warning")
        return account_command(sys.argv[2:])
    settings = load_settings(ControlPlaneSettings, "control")
    log.configure("tandem-control", settings.log_json)
    tracing.configure("tandem-control", settings.otlp_endpoint or None)
    metrics.configure("tandem-control", settings.otlp_endpoint or None)
    return lifecycle.run(lambda drain: Gateway(settings).run(drain), settings.loop_stall_seconds)


if __name__ == "__main__":
    sys.exit(main())
