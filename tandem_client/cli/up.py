"""What does `tandem up` do, from the checks before anything starts to the last process's end?"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from tandem_client.cli.configured import configured_settings
from tandem_client.cli.fleet import FleetMember
from tandem_client.cli.follow_log import follow_logs
from tandem_client.cli.machine import this_machine
from tandem_client.cli.plan import ProcessSpec, UpOptions, cores_beside_decode, plan
from tandem_client.cli.progress import ProgressDisplay, follow_until_ready
from tandem_client.cli.supervisor import Supervisor
from tandem_client.connection import DEFAULT_BASE_URL
from tandem_client.wire import request_headers


class CannotStart(Exception):
    """Something that would fail is wrong before anything has started; says what, and what to do."""


def up(options: UpOptions, console: Console) -> int:
    """Check, start everything, and keep it running until a signal; returns the exit code."""
    check_options(options)
    check_ports(options)
    machine = this_machine()
    try:
        specs = plan(machine, options, configured_settings(options.config))
    except ValueError as error:
        raise CannotStart(str(error)) from error
    cores = cores_beside_decode(machine, specs)
    if cores and hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores)  # and so of all that is started from here; engines go where they are told
    return asyncio.run(_up(options, specs, prepare_logs(specs, options.port), console))


def check_options(options: UpOptions) -> None:
    if options.num_decode < 1:
        raise CannotStart(f"--decode is {options.num_decode}; at least one decode worker must write the answers")
    if options.num_prefill < 0:
        raise CannotStart(f"--prefill is {options.num_prefill}; 0 lets decode workers read the prompts too")
    if options.host not in ("127.0.0.1", "::1", "localhost") and not options.insecure:
        raise CannotStart(
            f"--host {options.host} lets other machines call this one without TLS; add --insecure if that is meant"
        )


def check_ports(options: UpOptions) -> None:
    """Refuse ports that someone listens on, before a child would fail on them."""
    for flag, host, port in (("--port", options.host, options.port), ("--grpc-port", "127.0.0.1", options.grpc_port)):
        if not _can_listen(host, port):
            raise CannotStart(
                f"port {port} on {host} is in use{_by_whom(options, port)}; stop what listens there, or choose others: "
                f"tandem up --port {options.port + 10} --grpc-port {options.grpc_port + 10} (this is {flag})"
            )


def prepare_logs(specs: Sequence[ProcessSpec], port: int) -> Path:
    """Make the log folder of a Tandem at `port`; the logs of the run before are kept beside, as NAME.log.1."""
    folder = state_dir() / "logs" / str(port)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for spec in specs:
        log = folder / f"{spec.name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
    return folder


def state_dir() -> Path:
    """Return where Tandem keeps what outlives a process: TANDEM_STATE_DIR, else XDG's state folder."""
    if chosen := os.environ.get("TANDEM_STATE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tandem"


def curl_line(url: str, model: str) -> str:
    """Return a command to paste that streams an answer."""
    body = json.dumps({"prompt": "What is a KV cache?", "stream": True})
    return f"curl -N {url}/client/v4/accounts/default/ai/run/{shlex.quote(model)} -d {shlex.quote(body)}"


def chat_line(url: str) -> str:
    """Return a command to paste that opens a chat, with `tandem` as it was found this time."""
    called = sys.argv[0] if Path(sys.argv[0]).name == "tandem" else "tandem"
    return shlex.join([called, "chat", *([] if url == DEFAULT_BASE_URL else ["--url", url])])


async def _up(options: UpOptions, specs: Sequence[ProcessSpec], log_folder: Path, console: Console) -> int:
    def announce(name: str, what: str) -> None:
        console.print(Text.assemble((name, "bold"), "  ", what), soft_wrap=True)

    supervisor = Supervisor(specs, log_folder, announce)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, supervisor, console)
    helpers = [asyncio.create_task(_show_start(options, supervisor, log_folder, console))]
    if options.verbose:
        helpers.append(asyncio.create_task(follow_logs([child.log_path for child in supervisor.children], console)))
    for helper in helpers:
        helper.add_done_callback(lambda done: None if done.cancelled() or not done.exception() else supervisor.stop())
    supervisor.on_stop(helpers[0].cancel)  # gives the terminal back before the last lines
    try:
        code = await supervisor.run()
    finally:
        for helper in helpers:
            helper.cancel()
        results = await asyncio.gather(*helpers, return_exceptions=True)
    console.print("Stopped." if code == 0 else "Stopped, because of the above.", highlight=False)
    for result in results:
        if isinstance(result, Exception):  # a mistake of ours in the display must not stay hidden
            raise result
    return code


def _on_signal(supervisor: Supervisor, console: Console) -> None:
    if supervisor.is_stopping:
        console.print("Stopping at once.", highlight=False)
    else:
        console.print(
            "\nDraining: what runs may finish, for 30 s at most. Ctrl-C again stops at once.", highlight=False
        )
    supervisor.stop()


async def _show_start(options: UpOptions, supervisor: Supervisor, log_folder: Path, console: Console) -> None:
    started = time.monotonic()
    # The loopback is asked directly; a proxy from the environment is no way to our own machine.
    headers = request_headers(options.operator_token, None)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, trust_env=False, timeout=5.0) as client:
        with ProgressDisplay(console, supervisor.specs) as display:
            members = await follow_until_ready(client, lambda: supervisor.specs, display.show)
    _print_ready(options, members, log_folder, time.monotonic() - started, console)


def _print_ready(
    options: UpOptions, members: Sequence[FleetMember], log_folder: Path, seconds: float, console: Console
) -> None:
    model = next(member.model for member in members if member.model)
    console.print()
    console.print(
        Text.assemble("Tandem is ready after ", f"{seconds:.1f} s: ", (options.url, "bold cyan")), soft_wrap=True
    )
    console.print()
    console.print(Text.assemble("  ", (curl_line(options.url, model), "green")), soft_wrap=True)
    console.print(Text.assemble("  ", (chat_line(options.url), "green")), soft_wrap=True)
    console.print()
    console.print(Text(f"Ctrl-C drains and stops it. Logs: {log_folder}", style="dim"), soft_wrap=True)


def _can_listen(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(address)
        except PermissionError as error:
            raise CannotStart(f"may not listen on port {port}: {error}; choose one above 1023") from error
        except OSError:
            return False
    return True


def _by_whom(options: UpOptions, port: int) -> str:
    """Say that it is another Tandem, if it is: then there is nothing to start."""
    if port != options.port:
        return ""
    try:
        answer = httpx.get(f"{options.url}/v1/workers", timeout=1.0, trust_env=False)
        is_closed = answer.status_code == httpx.codes.UNAUTHORIZED and "cf-ai-req-id" in answer.headers
        is_tandem = is_closed or (answer.is_success and answer.json().get("object") == "list")
    except (httpx.HTTPError, ValueError, AttributeError):
        return ""
    return " by a Tandem that already runs (see `tandem status`)" if is_tandem else ""
