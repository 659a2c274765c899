"""The probes that the documentation shows are ones that our processes answer."""

from __future__ import annotations

import re

from control_plane.api.admin import operations
from control_plane.settings import ControlPlaneSettings
from tandem_runtime import health_check
from tests.docs.markdown import ROOT

_SECTION = (ROOT / "docs/operate/README.md").read_text().split("## Probes")[1].split("```")[1]


def test_http_probes_ask_the_gateways_port_for_paths_that_it_has() -> None:
    found = re.findall(r"httpGet: \{path: (\S+), port: (\d+)\}", _SECTION)
    assert [path for path, _ in found] == ["/healthz", "/readyz"]
    assert {path for path, _ in found} <= {route.path for route in operations.routes()}
    assert {port for _, port in found} == {ControlPlaneSettings().listen.rpartition(":")[2]}


def test_exec_probes_are_commands_that_can_be_run_and_kill_no_worker_that_loads_or_drains() -> None:
    commands = re.findall(r"command: \[(.*)\]", _SECTION)
    assert len(commands) == 2
    for command in commands:
        python, dash_m, module, *flags = [word.strip(' "') for word in command.split(",")]
        assert (python, dash_m, module) == ("python", "-m", health_check.__name__)
        parsed = health_check._parser().parse_args(flags)
        assert parsed.alive
        # Else Kubernetes would end the probe before it can say why.
        assert all(parsed.seconds < float(seconds) for seconds in re.findall(r"timeoutSeconds: (\d+)", _SECTION))
