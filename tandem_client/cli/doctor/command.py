"""Runs all examinations and prints their findings."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tandem_client.cli.doctor import certificates, gpu, machine, network
from tandem_client.cli.doctor.finding import Finding, Level

_SIGNS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("--", "dim"),
    "warn": ("warn", "yellow"),
    "fail": ("fail", "red"),
}


@dataclass(frozen=True)
class DoctorOptions:
    state_dir: Path
    model: Path | None
    port: int
    grpc_port: int
    url: str | None


def examine(options: DoctorOptions) -> list[Finding]:
    """Examine everything; changes nothing on this machine."""
    return list(_findings(options))


def _findings(options: DoctorOptions) -> Iterator[Finding]:
    yield Finding("tandem", "ok", f"{importlib.metadata.version('tandem-serve')} on Python {platform.python_version()}")
    yield from machine.processor()
    yield from machine.memory(options.model)
    yield from machine.shared_memory()
    yield from machine.disk(options.state_dir)
    yield from machine.compiler()
    yield from machine.limits()
    yield from network.ports(options.port, options.grpc_port)
    yield from certificates.certificates(options.state_dir)
    yield from network.clock(options.url)
    yield from gpu.gpu()


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if something fails, else 0."""
    return int(any(finding.level == "fail" for finding in findings))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"ok": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}


def view(findings: Sequence[Finding]) -> Group:
    """Return a table with one line per finding, its remedy below it, and a sum."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for _ in range(3):
        table.add_column(overflow="fold")
    shown = ""
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        about = "" if finding.about == shown else finding.about
        shown = finding.about
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=style)
        table.add_row(Text(sign, style=style), Text(about, style="bold"), text)
    return Group(table, _sum(findings))


def _sum(findings: Sequence[Finding]) -> Text:
    counts = Counter(finding.level for finding in findings)
    if counts["fail"]:
        return Text(f"\n  {counts['fail']} to mend before Tandem runs here", style="red")
    if counts["warn"]:
        return Text(f"\n  Tandem runs here; {counts['warn']} worth a look", style="yellow")
    return Text("\n  Tandem runs here.", style="green")
