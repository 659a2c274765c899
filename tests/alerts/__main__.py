"""Injects each fault several times, and prints the seconds until its alerts fire and end: `python -m tests.alerts`.

The rules have the short windows of `infra.observability.pace.SHORT`. `--look` also prints the texts of each alert, and
what the commands of its runbook print meanwhile. Exit code 0: every alert fired and ended each time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from tests.alerts.faults import CERTIFICATES, DEVICE_ERRORS, FAULTS, THROTTLED, Expected, Fault
from tests.alerts.scene import Scene, open_scene
from tests.alerts.test_runbooks import commands_of, run_command
from tests.docs.markdown import ROOT

_SECONDS = 60.0
_MAX_LINES = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each fault is injected [3]")
    parser.add_argument("--look", action="store_true", help="print what the runbooks' commands print")
    flags = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"{'fault':32} {'alert':56} {'fires':>8} {'ends':>8}")
    for _ in range(flags.rounds):
        with tempfile.TemporaryDirectory(prefix="tandem-alerts-") as folder:
            asyncio.run(_round(Path(folder), is_looking=flags.look))
    return 0


async def _round(folder: Path, *, is_looking: bool) -> None:
    """Inject all faults once. Raises AssertionError for an alert that does not fire or end."""
    async with open_scene(folder) as scene:
        found = [await scene.prometheus.fires(*expected, seconds=_SECONDS) for expected in [*DEVICE_ERRORS, THROTTLED]]
        if is_looking:
            await _look(scene, found)
        for expected in DEVICE_ERRORS:
            await scene.prometheus.is_quiet(*expected, seconds=_SECONDS)
        for fault in FAULTS:
            await _inject(scene, fault, is_looking=is_looking)
        for alert, labels in CERTIFICATES:
            await scene.prometheus.has_fired_and_ended(alert, labels, seconds=2 * _SECONDS)
            print(f"{'a certificate before its renewal':32} {_named((alert, labels)):56} {'yes':>8} {'yes':>8}")


async def _inject(scene: Scene, fault: Fault, *, is_looking: bool) -> None:
    for expected in fault.alerts:
        await scene.prometheus.is_quiet(*expected, seconds=_SECONDS)
    began, seconds_until, found = time.monotonic(), {}, []
    async with fault.inject(scene):
        for expected in fault.alerts:
            found.append(await scene.prometheus.fires(*expected, seconds=_SECONDS))
            seconds_until[_named(expected)] = time.monotonic() - began
        if is_looking:
            await _look(scene, found)
    repaired = time.monotonic()
    for expected in fault.alerts:
        await scene.prometheus.is_quiet(*expected, seconds=_SECONDS)
        name, ended = _named(expected), time.monotonic() - repaired
        print(f"{fault.name:32} {name:56} {seconds_until[name]:6.1f} s {ended:6.1f} s", flush=True)


async def _look(scene: Scene, found: Sequence[dict[str, Any]]) -> None:
    """Print the texts of alerts, and what the commands of their runbooks print now."""
    for alert in found:
        texts = alert["annotations"]
        print(f"\n{alert['labels']['alertname']}: {texts['summary']}\n    {texts['description']}")
    for page in dict.fromkeys(ROOT / alert["annotations"]["runbook"] for alert in found):
        print(f"\n{page.name}")
        for command in commands_of(page):
            printed = await asyncio.to_thread(
                run_command.__wrapped__, command, scene.fleet.base_url, scene.prometheus.base_url
            )
            print(f"    $ {command}\n{_indented(printed)}")


def _named(expected: Expected) -> str:
    alert, labels = expected
    return f"{alert} {' '.join(f'{name}={value}' for name, value in labels.items())}".strip()


def _indented(printed: str) -> str:
    lines: list[Any] = re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE).splitlines()[:_MAX_LINES]
    return "\n".join(f"    {line[:600]}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
