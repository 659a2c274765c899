"""Shows the progress of `tandem up` while the processes load.

On a terminal, each process has one line, which changes in place. Elsewhere, each new stage of a process is printed as a
line. The stages come from GET /v1/workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tandem_client.cli.fleet import FleetMember, ask, parse_fleet
from tandem_client.cli.plan import ProcessSpec

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Stage:
    """The stage of one process: a text, the progress from 0 to 1 if known, and whether the process is ready."""

    text: str
    progress: float | None = None
    ready: bool = False


def stages(specs: Sequence[ProcessSpec], members: Sequence[FleetMember] | None) -> dict[str, Stage]:
    """Return each process's stage; `members` is None until the control plane answers."""
    found = _match(specs, members or [])
    return {spec.name: _stage(spec, found.get(spec.name), members is not None) for spec in specs}


def _match(specs: Sequence[ProcessSpec], members: Sequence[FleetMember]) -> dict[str, FleetMember]:
    """Find each process's entry by its name, else by its role, in order."""
    by_id = {member.id: member for member in members}
    found: dict[str, FleetMember] = {}
    for spec in specs:
        same_name = [member for member in by_id.values() if (member.name, member.role) == (spec.name, spec.role)]
        if same_name:
            found[spec.name] = by_id.pop(same_name[0].id)
    for spec in specs:
        same_role = [member for member in by_id.values() if member.role == spec.role]
        if spec.name not in found and same_role:
            found[spec.name] = by_id.pop(same_role[0].id)
    return found


def _stage(spec: ProcessSpec, member: FleetMember | None, control_answers: bool) -> Stage:
    if spec.role == "control":
        return Stage("ready", ready=True) if control_answers else Stage("starting")
    if member is None:
        return Stage("starting")
    if member.state == "ready":
        return Stage(f"ready{_ready_details(spec, member)}", ready=True)
    if member.state == "failed":
        return Stage(f"failed: {member.error}")
    return Stage(member.load_stage.replace("_", " ") or member.state, member.load_progress or None)


def _ready_details(spec: ProcessSpec, member: FleetMember) -> str:
    facts = [member.model] if member.model else []
    if member.pool:
        facts.append(f"{member.pool.total_blocks:,} KV blocks")
    if spec.cores:
        facts.append(f"core{'s' if len(spec.cores) > 1 else ''} {_ranges(spec.cores)}")
    return "".join(f" · {fact}" for fact in facts)


def _ranges(cores: Sequence[int]) -> str:
    """Format neighbouring cores as ranges: (0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class ProgressDisplay:
    """Shows the stages. A context manager, because the terminal's cursor must be restored."""

    def __init__(self, console: Console, specs: Sequence[ProcessSpec]) -> None:
        self._console = console
        self._names = [spec.name for spec in specs]
        self._width = max(len(name) for name in self._names)
        self._shown: dict[str, str] = {}
        self._spinners = {name: Spinner("dots", style="cyan") for name in self._names}
        self._live = Live(console=console, refresh_per_second=10) if console.is_terminal else None

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, current: dict[str, Stage]) -> None:
        if self._live:
            self._live.update(self._table(current))
            return
        for name, stage in current.items():
            if self._shown.get(name) != stage.text:
                self._shown[name] = stage.text
                self._console.print(
                    f"{name:<{self._width}}  {stage.text}", markup=False, highlight=False, soft_wrap=True
                )

    def _table(self, current: dict[str, Stage]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, stage in current.items():
            mark = Text("✓", style="green") if stage.ready else self._spinners[name]
            table.add_row(mark, Text(name, style="bold"), _stage_text(stage))
        return table


def _stage_text(stage: Stage) -> Text:
    text = Text(stage.text, style="" if stage.ready else "dim")
    if stage.progress is not None and not stage.ready:
        num_filled = round(20 * stage.progress)
        text.append("  " + "━" * num_filled, style="cyan").append("━" * (20 - num_filled), style="bright_black")
        text.append(f" {stage.progress:4.0%}")
    return text


async def follow_until_ready(
    client: httpx.AsyncClient,
    specs: Callable[[], Sequence[ProcessSpec]],
    show: Callable[[dict[str, Stage]], None],
) -> list[FleetMember]:
    """Show the stages until /readyz succeeds for the model of every worker; return the fleet then."""
    while True:
        answer = await ask(client, "/v1/workers")
        members = parse_fleet(answer.json()) if answer and answer.is_success else None
        current = stages(specs(), members)
        show(current)
        if members and all(stage.ready for stage in current.values()):
            models = {member.model for member in _match(specs(), members).values() if member.model}
            answers = [await ask(client, f"/readyz?model={quote(model, safe='')}") for model in sorted(models)]
            if all(ready and ready.is_success for ready in answers):
                return members
        await asyncio.sleep(POLL_SECONDS)
