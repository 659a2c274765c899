"""`python -m control_plane`: run a control-plane process; see --help."""

from __future__ import annotations

import sys

from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from runtime import lifecycle, log, metrics, tracing
from runtime.settings import load_settings


def main() -> int:
    settings = load_settings(ControlPlaneSettings, "control")
    log.configure("tandem-control", settings.log_json)
    tracing.configure("tandem-control", settings.otlp_endpoint or None)
    metrics.configure("tandem-control", settings.otlp_endpoint or None)
    return lifecycle.run(lambda drain: Gateway(settings).run(drain))


if __name__ == "__main__":
    sys.exit(main())
