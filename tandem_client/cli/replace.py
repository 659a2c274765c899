"""`tandem up --replace`: both sides of the replacement of workers in a running `tandem up`.

The command makes the new workers' commands: those of the running workers, with its own Python and the flags that were
given. So a command of a new release starts workers of that release. The running `tandem up` does the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from tandem_client.cli.control_socket import VERSION, Caller, Refused, Send
from tandem_client.cli.plan import ProcessSpec, UpOptions
from tandem_client.cli.roll_fleet import GatewayFleet
from tandem_client.cli.rolling import Roll, RollOptions, RollStep, next_name, renamed, with_flag
from tandem_client.cli.supervisor import Announce, Supervisor
from tandem_client.wire import request_headers

_ORDER = ("decode", "prefill", "encode")
"""Decode first: a new decode worker is idle, so that a probe of a prefill worker finds room."""
_MAX_STEPS = 1_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Of a worker: its log has this name."""


@dataclass(frozen=True)
class ReplaceOptions:
    """The flags of `tandem up --replace`."""

    port: int
    model: str | None = None
    """Only the workers of this model."""
    checkpoint: str | None = None
    """What the new workers load; None: what the old ones did."""
    config: Path | None = None
    roll: RollOptions = field(default_factory=RollOptions)


# -------------------------------------------------------------------------------------------- the command's own side


def replace_workers(options: ReplaceOptions, state_dir: Path, console: Console) -> int:
    """Replace the workers of a running `tandem up`; return the exit code. Raise NotRunning or Refused."""
    with Caller(state_dir, options.port) as caller:
        caller.send({"call": "workers"})
        answer = next(caller.lines(), {})
    if answer.get("version") != VERSION:
        raise Refused(
            "the running `tandem up` is of a release that cannot replace workers this way; end it and start the new one"
        )
    steps = plan_steps(answer["workers"], options, os.environ)
    with Caller(state_dir, options.port) as caller:
        caller.send({"call": "replace", "steps": [asdict(step) for step in steps], **asdict(options.roll)})
        try:
            why = _show(caller, console)
        except KeyboardInterrupt:
            console.print("\nTaking everything back. Ctrl-C again leaves; it goes on in `tandem up`.", highlight=False)
            caller.send({"call": "cancel"})
            why = _show(caller, console)
    if why:
        console.print(f"Taken back: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(f"{len(steps)} workers replaced.", highlight=False)
    return 0


def _show(caller: Caller, console: Console) -> str:
    """Print the lines of a roll; return why it was taken back, or ""."""
    for line in caller.lines():
        if "end" in line:
            return str(line["end"])
        name = f"{line['name']}  " if line["name"] else ""
        console.print(Text.assemble((name, "bold"), str(line["what"])), soft_wrap=True)
    return "`tandem up` has ended"


def plan_steps(
    workers: Sequence[Mapping[str, Any]], options: ReplaceOptions, environment: Mapping[str, str]
) -> list[RollStep]:
    """Return what is replaced by what. Raise Refused if no worker is chosen."""
    chosen = [each for each in workers if options.model in (None, each["model"])]
    if not chosen:
        models = ", ".join(sorted({each["model"] for each in workers if each["model"]})) or "none"
        raise Refused(f"no worker serves {options.model}; the models here are {models}")
    taken = {str(each["name"]) for each in workers}
    steps = []
    for worker in sorted(chosen, key=lambda each: _ORDER.index(each["role"])):
        old = parse_spec(worker)
        name = next_name(old.name, taken)
        taken.add(name)
        steps.append(RollStep(old.name, new_spec(old, name, worker["model"], options, environment)))
    return steps


def new_spec(
    old: ProcessSpec, name: str, model: str, options: ReplaceOptions, environment: Mapping[str, str]
) -> ProcessSpec:
    """Return the new worker in the place of an old one: with this Python, this folder and this environment."""
    command = (sys.executable, *renamed(old.command, name)[1:])
    if options.checkpoint is not None:
        command = with_flag(command, "--model", options.checkpoint)
        if "--served-model-name" not in command and model:  # clients go on with the same name
            command = with_flag(command, "--served-model-name", model)
    if options.config is not None:
        command = with_flag(command, "--config", str(options.config.resolve()))
    prefix = f"TANDEM_{old.role.upper()}_"
    settings = {key: value for key, value in environment.items() if key.startswith(prefix)}
    ours = {"PYTHONPATH": environment.get("PYTHONPATH", ""), **settings}
    return replace(
        old,
        name=name,
        command=command,
        environment=tuple((dict(old.environment) | ours).items()),
        folder=str(Path.cwd()),
    )


# ------------------------------------------------------------------------------------------- the running `tandem up`


class Replacements:
    """Answers the calls of `tandem up --replace`, one replacement at a time."""

    def __init__(self, supervisor: Supervisor, options: UpOptions, announce: Announce) -> None:
        self._supervisor = supervisor
        self._options = options
        self._announce = announce
        self._rolling = False
        self._is_ready = False

    def started(self) -> None:
        """All processes have started: from now on they can be replaced."""
        self._is_ready = True

    async def call(self, request: dict[str, Any], send: Send, left: asyncio.Event) -> None:
        """Answer one call. Raise Refused."""
        if not self._is_ready:
            raise Refused("`tandem up` is still starting; wait until it is ready")
        headers = request_headers(self._options.operator_token, None)
        async with httpx.AsyncClient(
            base_url=self._options.url, headers=headers, trust_env=False, timeout=5.0
        ) as client:
            match request.get("call"):
                case "workers":
                    send({"workers": await self._workers(GatewayFleet(client)), "version": VERSION})
                case "replace":
                    await self._replace(request, send, left, GatewayFleet(client))
                case other:
                    raise Refused(f"there is no call {str(other)[:100]!r}")

    async def _workers(self, fleet: GatewayFleet) -> list[dict[str, Any]]:
        models = {member.name: member.model for member in await fleet.members()}
        return [
            {**asdict(spec), "model": models.get(spec.name, "")}
            for spec in self._supervisor.specs
            if spec.role in _ORDER
        ]

    async def _replace(self, request: dict[str, Any], send: Send, left: asyncio.Event, fleet: GatewayFleet) -> None:
        steps, options = _parse_roll(request, {spec.name: spec.role for spec in self._supervisor.specs})
        if self._rolling:
            raise Refused("another `tandem up --replace` runs; wait for its end, or end it with Ctrl-C")

        def tell(name: str, what: str) -> None:
            send({"name": name, "what": what})

        self._rolling = True
        roll = Roll(self._supervisor, fleet, steps, options, tell)
        watching = asyncio.create_task(_cancel_once(left, roll))
        running = asyncio.create_task(roll.run())
        self._supervisor.on_stop(running.cancel)
        self._announce("", f"replaces {len(steps)} workers")
        try:
            why = await running
        except asyncio.CancelledError:
            if not self._supervisor.is_stopping:
                running.cancel()
                raise
            why = "`tandem up` was stopped"
        finally:
            watching.cancel()
            self._rolling = False
        self._announce("", f"the replacement was taken back: {why}" if why else f"{len(steps)} workers are replaced")
        send({"end": why})


async def _cancel_once(left: asyncio.Event, roll: Roll) -> None:
    await left.wait()
    roll.cancel("the command was ended")


def _parse_roll(request: Mapping[str, Any], roles: Mapping[str, str]) -> tuple[list[RollStep], RollOptions]:
    """Return a roll as asked for. Raise Refused if it names other processes than workers."""
    try:
        steps = [RollStep(str(step["old"]), parse_spec(step["new"])) for step in request["steps"]]
        options = RollOptions(float(request["drain_seconds"]), float(request["start_seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"the call has another form than this release's: {error!r}") from error
    if not 0 < len(steps) <= _MAX_STEPS:
        raise Refused(f"{len(steps)} workers are to be replaced; 1 to {_MAX_STEPS} can be")
    for step in steps:
        is_worker = step.new.role in _ORDER and roles.get(step.old) == step.new.role
        if not is_worker or step.new.name in roles or not _NAME.fullmatch(step.new.name):
            raise Refused(f"{step.old} cannot be replaced by {step.new.name}; see `tandem status`")
    return steps, options


def parse_spec(entry: Mapping[str, Any]) -> ProcessSpec:
    """Return a process as it was sent. Raise KeyError, TypeError or ValueError for another form."""
    return ProcessSpec(
        name=str(entry["name"]),
        role=str(entry["role"]),
        command=tuple(str(word) for word in entry["command"]),
        environment=tuple((str(key), str(value)) for key, value in entry["environment"]),
        cores=tuple(int(core) for core in entry["cores"]),
        folder=str(entry["folder"]),
    )
