"""`tandem replay`: lets the control plane's command simulate a fleet, and shows the figures as a table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from tandem_client.cli.terminal import console

HELP = "Replay a trace on a simulated fleet: what if there were more workers, more load, another router?"
_COLUMNS = (
    ("TTFT p50, ms", "ttft_ms.p50", "{:,.0f}"),
    ("TTFT p99, ms", "ttft_ms.p99", "{:,.0f}"),
    ("TPOT p99, ms", "tpot_ms.p99", "{:,.1f}"),
    ("in budget", "goodput_share", "{:.1%}"),
    ("requests/s in budget", "goodput_per_second", "{:,.2f}"),
    ("cached", "cached_share", "{:.1%}"),
    ("handed over", "handed_over_share", "{:.0%}"),
)
_OF_ADMISSION = (
    ("refused", "refused_share", "{:.1%}"),
    ("accepted, in budget", "accepted_met_share", "{:.1%}"),
    ("refused, would be in budget", "refused_would_share", "{:.1%}"),
)
"""Shown if any policy has refused a request."""
_SHARE = "share."


class NotInstalled(Exception):
    """The control plane is not installed on this machine."""


def replay(arguments: Sequence[str]) -> int:
    """Run `python -m control_plane replay ...`, print its table; return the exit status. Raise NotInstalled.

    `--json` prints the figures as they come.
    """
    if importlib.util.find_spec("control_plane") is None:
        raise NotInstalled("`tandem replay` runs the control plane's router; install tandem-serve[control]")
    as_json = "--json" in arguments
    passed = [argument for argument in arguments if argument != "--json"]
    command = [sys.executable, "-m", "control_plane", "replay", *passed]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode or as_json or not done.stdout.startswith("{"):  # not JSON: the help
        sys.stdout.write(done.stdout)
        return done.returncode
    console().print(view(json.loads(done.stdout)))
    return 0


def view(found: Mapping[str, Any]) -> Table:
    """Return the figures of each policy. With several runs, a figure has half the width of its 95 % interval."""
    load = "as in the trace" if found["load"] is None else f"{found['load']:g}"
    title = (
        f"{found['trace']} on {found['num_prefill']} prefill and {found['num_decode']} decode workers (simulated), "
        f"load {load}, {found['num_seeds']} run{'s' if found['num_seeds'] > 1 else ''}"
    )
    policies = found["policies"]
    has_refused = any(figures["refused_share"]["mean"] for figures in policies.values())
    columns = (*_COLUMNS, *_OF_ADMISSION) if has_refused else _COLUMNS
    has_accounts = any(name.startswith(_SHARE) for figures in policies.values() for name in figures)
    names = [*(name for name, _, _ in columns), *(["device time by account"] if has_accounts else [])]
    table = Table("policy", *names, title=title, title_justify="left", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for policy, figures in policies.items():
        cells = [_cell(figures[name], form) for _, name, form in columns]
        table.add_row(policy, *cells, *([_accounts(figures)] if has_accounts else []))
    return table


def _accounts(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the part of each account that the run has told of."""
    parts = ((name.removeprefix(_SHARE), each["mean"]) for name, each in figures.items() if name.startswith(_SHARE))
    return ", ".join(f"{account} {part:.1%}" for account, part in parts)


def _cell(figure: Mapping[str, float | None], form: str) -> str:
    mean, half = figure["mean"], figure["half"]
    return form.format(mean) if half is None else f"{form.format(mean)} ± {form.format(half)}"
