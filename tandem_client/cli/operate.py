"""The commands for operators: status, top, events, explain, drain, resume, logs and doctor."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group
from rich.live import Live

from tandem_client.cli import events, explanation, fleet, status, top
from tandem_client.cli import logs as logs_command
from tandem_client.cli import up as up_command
from tandem_client.cli.doctor import command as doctor_command
from tandem_client.cli.doctor.command import DoctorOptions
from tandem_client.cli.fetching import get_json, names_of_workers, post_json
from tandem_client.cli.following import will_pass
from tandem_client.cli.terminal import Url, console, fail, said, silence_stdout, warn
from tandem_client.connection import Connection
from tandem_client.errors import TandemAPIError

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

_PIPE_LINES = 50
"""Lines of `tandem top` where there is no terminal."""


class LogLevel(StrEnum):
    """The levels of log lines."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


WorkerName = Annotated[str, typer.Argument(help="The worker's name or id, as in `tandem status`.")]
AnswerAsJson = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]


@app.command("status")
def show_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the control plane's answer as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second, until Ctrl-C.")] = False,
    url: Url = None,
) -> None:
    """Show the workers and KV services: state, load, KV blocks and memory."""
    try:
        if as_json:
            typer.echo(json.dumps(_workers(url), indent=2))
        elif watch:
            _watch(url)
        else:
            console().print(_fleet_view(url))
    except KeyboardInterrupt:
        return
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="The request's id: x-request-id of its answer.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")] = False,
    url: Url = None,
) -> None:
    """Show where the time of a request went, why it went to its workers, what moved, and what it cost."""
    try:
        explained = get_json(url, f"/v1/requests/{quote(request_id, safe='')}/explain")
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))
    if as_json:
        typer.echo(json.dumps(explained, indent=2))
    else:
        console().print(explanation.explanation_view(explained, names_of_workers(url)))


@app.command("events")
def show_events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events, until Ctrl-C.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", help="Newest events to print first.", min=1, max=1000)] = 40,
    kind: Annotated[str | None, typer.Option(help="Events of one kind, such as worker_lost.")] = None,
    severity: Annotated[str | None, typer.Option(help="Events of one severity: info, warning or error.")] = None,
    worker: Annotated[str | None, typer.Option(help="Events of one worker, by its id or name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
    url: Url = None,
) -> None:
    """Show what the fleet decided and why: joins, losses, moves, refusals, certificates."""
    wanted = {"kind": kind, "severity": severity, "worker": worker}
    query = {name: value for name, value in wanted.items() if value}

    def fetch(more: Mapping[str, str]) -> dict[str, Any]:
        return get_json(url, "/v1/events", {**query, **more})

    try:
        printer = events.EventPrinter(console(), as_json=as_json)
        last = events.show(fetch, number, printer)
        if follow:
            events.follow(fetch, last, printer, lambda error: warn(f"{said(error, url)}; asking again"))
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        return
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))


@app.command()
def drain(worker: WorkerName, as_json: AnswerAsJson = False, url: Url = None) -> None:
    """Let a worker finish what runs and take no new requests. The process stays; `tandem resume` takes it back."""
    _drain(worker, "drain", as_json, url)


@app.command()
def resume(worker: WorkerName, as_json: AnswerAsJson = False, url: Url = None) -> None:
    """Let a worker that was drained take requests again."""
    _drain(worker, "resume", as_json, url)


def _drain(worker: str, action: str, as_json: bool, url: str | None) -> None:
    try:
        answer = post_json(url, f"/v1/workers/{quote(worker, safe='')}/{action}")
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    name, num_running = answer.get("name") or answer["id"], answer["num_running"]
    running = f"; {num_running:,} {'request' if num_running == 1 else 'requests'} still there" if num_running else ""
    if answer["state"] == "draining":
        typer.echo(f"{name} takes nothing new{running}. `tandem resume {name}` takes it back.")
    else:
        typer.echo(f"{name} is {answer['state']}{running}.")
    if warning := answer.get("warning"):
        warn(warning)


@app.command("top")
def show_top(
    once: Annotated[bool, typer.Option("--once", help="Print one look at the fleet and end.")] = False,
    url: Url = None,
) -> None:
    """Show models, memory and requests as they change, each second, until Ctrl-C."""
    try:
        terminal = console()
        seen = _seen(url)
        if once or not terminal.is_terminal:
            terminal.print(top.top_view(seen, height=_PIPE_LINES))
            return
        with Live(top.top_view(seen, terminal.height), console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                seen = _seen_after(seen, url)
                live.update(top.top_view(seen, terminal.height), refresh=True)
    except KeyboardInterrupt:
        return
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))


def _seen_after(before: top.Seen, url: str | None) -> top.Seen:
    """Look again; while the gateway is away, return what was last seen and say so."""
    try:
        return _seen(url)
    except TandemAPIError as error:
        if not will_pass(error):
            raise
        return replace(before, problem=f"{said(error, url)}; this is what was last seen")


def _seen(url: str | None) -> top.Seen:
    requests = get_json(url, "/v1/requests", {"limit": "100"})["data"]
    return top.Seen(Connection.resolve(url, None, "default").base_url, fleet.parse_fleet(_workers(url)), requests)


@app.command()
def logs(
    process: Annotated[
        str | None, typer.Argument(help="Name of one process, such as decode-0.", show_default="all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each process.", min=0)] = 40,
    level: Annotated[LogLevel, typer.Option(help="Leave out lines below this level.")] = LogLevel.info,
    port: Annotated[
        int | None,
        typer.Option(
            help="HTTP port of the Tandem on this machine.",
            min=1,
            max=65535,
            show_default="that of $TANDEM_BASE_URL, else 8642, else the only one",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each line as JSON.")] = False,
) -> None:
    """Show what the processes of `tandem up` have logged on this machine."""
    try:
        folder = up_command.state_dir() / "logs"
        port = port or logs_command.port_of(folder, Connection.resolve(None, None, "default").base_url)
        paths = logs_command.logs_of(folder, port, process)
        options = logs_command.LogOptions(lines, level.value, as_json)
        (logs_command.follow if follow else logs_command.show)(paths, options, console())
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        return
    except (logs_command.NoLogs, up_command.CannotStart, ValueError) as error:
        fail(str(error))


@app.command()
def doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder whose memory is counted.", show_default="the built-in @tandem/demo"),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the HTTP gateway.", min=1, max=65535)] = 8642,
    grpc_port: Annotated[int, typer.Option(help="Port where the workers register.", min=1, max=65534)] = 8643,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    url: Url = None,
) -> None:
    """Examine this machine: memory, disk, compiler, limits, ports, certificates, clock and GPUs.

    Names a remedy for each thing that is missing; changes nothing. Exit code 1 if Tandem cannot run.
    """
    if model is not None and not model.is_dir():
        fail(f"--model {model} is not a folder; give one with config.json and safetensors")
    try:
        findings = doctor_command.examine(DoctorOptions(up_command.state_dir(), model, port, grpc_port, url))
    except (up_command.CannotStart, ValueError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(doctor_command.as_json(findings), indent=2))
    else:
        console().print(doctor_command.view(findings))
    raise typer.Exit(doctor_command.exit_code(findings))


def _watch(url: str | None) -> None:
    terminal = console()
    if not terminal.is_terminal:  # a pipe gets one table after another
        while True:
            terminal.print(_fleet_view(url))
            time.sleep(1.0)
    with Live(_fleet_view(url), console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(_fleet_view(url), refresh=True)


def _fleet_view(url: str | None) -> Group:
    members = fleet.parse_fleet(_workers(url))
    return status.fleet_view(members, Connection.resolve(url, None, "default").base_url)


def _workers(url: str | None) -> dict[str, object]:
    return get_json(url, "/v1/workers")
