"""`tandem up`: checks options and ports, starts all processes, shows the start, and waits for the end."""

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

from tandem_client.cli.bounded_log import older_log
from tandem_client.cli.control_socket import listening, socket_path
from tandem_client.cli.fleet import FleetMember
from tandem_client.cli.plan import (
    GATEWAY_STOP_SECONDS,
    Configured,
    ProcessSpec,
    UpOptions,
    configured_settings,
    cores_beside_decode,
    gateway_drain_seconds,
    plan,
    this_machine,
)
from tandem_client.cli.progress import ProgressDisplay, follow_until_ready
from tandem_client.cli.replace import Replacements
from tandem_client.cli.supervisor import Announce, RestartPolicy, Supervisor
from tandem_client.connection import DEFAULT_BASE_URL
from tandem_client.wire import request_headers
from tandem_machine.folders import home_folder
from tandem_machine.limits import too_few_processes, with_remedy
from tandem_machine.platforms import unsupported


class CannotStart(Exception):
    """A check failed before any process was started; the message names the problem and the remedy."""


def up(options: UpOptions, console: Console) -> int:
    """Check the options, start all processes, and keep them running until a signal; return the exit code."""
    check_options(options)
    machine = this_machine()
    try:
        configured = configured_settings(options.config)
        specs = plan(machine, options, configured)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    check_ports(options, configured)
    if why := too_few_processes(len(specs)):
        raise CannotStart(why)
    cores = cores_beside_decode(machine, specs)
    if cores and hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores)  # children inherit this; engines set their own cores
    try:
        drain = gateway_drain_seconds(configured)
        return asyncio.run(_up(options, specs, prepare_logs(specs, options.port), console, drain))
    except (OSError, RuntimeError) as error:
        if (text := with_remedy(str(error))) == str(error):
            raise
        raise CannotStart(text) from error  # other processes of the user have reached the limit


def check_options(options: UpOptions) -> None:
    if why := unsupported():
        raise CannotStart(why)
    if options.num_decode < 1:
        raise CannotStart(f"--decode is {options.num_decode}; at least one decode worker is needed")
    if options.num_prefill < 0:
        raise CannotStart(f"--prefill is {options.num_prefill}; give 0 or more; with 0, decode workers prefill too")
    is_allowed = options.insecure_http or options.insecure_plaintext
    if options.host not in ("127.0.0.1", "::1", "localhost") and not is_allowed:
        raise CannotStart(
            f"--host {options.host} lets other machines call this one without TLS; add --insecure-http to allow this"
        )


def check_ports(options: UpOptions, configured: Configured) -> None:
    """Raise CannotStart if a port is in use."""
    ports = [("--port", options.host, options.port), ("--grpc-port", "127.0.0.1", options.grpc_port)]
    if not options.insecure_plaintext and "enrolment_listen" not in configured["control"]:
        ports.append(("the port beside --grpc-port, for enrolment", "127.0.0.1", options.enrolment_port))
    for flag, host, port in ports:
        if not _can_listen(host, port):
            raise CannotStart(
                f"port {port} on {host} is in use{_other_tandem(options, port)}; stop what listens there, "
                f"or choose others: tandem up --port {options.port + 10} --grpc-port {options.grpc_port + 10} "
                f"(this is {flag})"
            )


def prepare_logs(specs: Sequence[ProcessSpec], port: int) -> Path:
    """Create the log folder for `port`; rename the logs of the last run to NAME.log.1."""
    folder = state_dir() / "logs" / str(port)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for spec in specs:
            log = folder / f"{spec.name}.log"
            if log.exists():
                log.replace(older_log(log))
    except OSError as error:
        raise CannotStart(
            f"cannot write logs: {error}; set TANDEM_STATE_DIR to a folder that can be written"
        ) from error
    return folder


def state_dir() -> Path:
    """Return the folder of Tandem's state: TANDEM_STATE_DIR, else the folder `tandem` in XDG's state folder."""
    if chosen := os.environ.get("TANDEM_STATE_DIR"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "tandem"
    if (home := home_folder()) is None:
        raise CannotStart("there is no home folder (no HOME, no entry in passwd); set TANDEM_STATE_DIR to a folder")
    return home / ".local" / "state" / "tandem"


def curl_line(url: str, model: str) -> str:
    """Return a curl command that streams an answer."""
    body = json.dumps({"prompt": "What is a KV cache?", "stream": True})
    return f"curl -N {url}/client/v4/accounts/default/ai/run/{shlex.quote(model)} -d {shlex.quote(body)}"


def chat_line(url: str) -> str:
    """Return a command that opens a chat, with the path of this `tandem`."""
    called = sys.argv[0] if Path(sys.argv[0]).name == "tandem" else "tandem"
    return shlex.join([called, "chat", *([] if url == DEFAULT_BASE_URL else ["--url", url])])


async def _up(
    options: UpOptions, specs: Sequence[ProcessSpec], log_folder: Path, console: Console, drain_seconds: float
) -> int:
    def announce(name: str, what: str) -> None:
        console.print(Text.assemble((name, "bold"), "  ", what), soft_wrap=True)

    policy = RestartPolicy(gateway_drain_seconds=drain_seconds + GATEWAY_STOP_SECONDS)
    supervisor = Supervisor(specs, log_folder, announce, policy, max_log_bytes=options.max_log_bytes)
    replacements = Replacements(supervisor, options, announce)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, supervisor, console, drain_seconds)
    helpers = [
        asyncio.create_task(_show_start(options, supervisor, log_folder, console)),
        asyncio.create_task(_answer_calls(replacements, options.port, announce)),
    ]
    helpers[0].add_done_callback(lambda done: replacements.started() if not done.cancelled() else None)
    if options.verbose:
        helpers.append(asyncio.create_task(follow_logs([child.log_path for child in supervisor.children], console)))
    for helper in helpers:
        helper.add_done_callback(lambda done: None if done.cancelled() or not done.exception() else supervisor.stop())
    supervisor.on_stop(helpers[0].cancel)  # restores the terminal before the last lines
    try:
        code = await supervisor.run()
    finally:
        for helper in helpers:
            helper.cancel()
        results = await asyncio.gather(*helpers, return_exceptions=True)
    console.print("Stopped." if code == 0 else "Stopped, because of the error above.", highlight=False)
    for result in results:
        if isinstance(result, Exception):  # a programming error in the display must not be hidden
            raise result
    return code


async def _answer_calls(replacements: Replacements, port: int, announce: Announce) -> None:
    """Answer `tandem up --replace` until cancelled. Without the socket, everything else goes on."""
    try:
        async with listening(socket_path(state_dir(), port), replacements.call):
            await asyncio.Event().wait()
    except OSError as error:
        announce("", f"`tandem up --replace` will not work: its socket cannot be made: {error}")


def _on_signal(supervisor: Supervisor, console: Console, drain_seconds: float) -> None:
    if supervisor.is_stopping:
        console.print("Stopping at once.", highlight=False)
    else:
        console.print(
            f"\nDraining: running requests may finish, within {drain_seconds:g} s. Ctrl-C again stops at once.",
            highlight=False,
        )
    supervisor.stop()


async def _show_start(options: UpOptions, supervisor: Supervisor, log_folder: Path, console: Console) -> None:
    started = time.monotonic()
    # trust_env=False: a proxy from the environment cannot reach this machine.
    headers = request_headers(options.operator_token, None)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, trust_env=False, timeout=5.0) as client:
        with ProgressDisplay(console, supervisor.specs) as display:
            members = await follow_until_ready(client, lambda: supervisor.specs, display.show)
    _print_ready(options, members, log_folder, time.monotonic() - started, console)


def _print_ready(
    options: UpOptions, members: Sequence[FleetMember], log_folder: Path, seconds: float, console: Console
) -> None:
    model = next(member.model for member in members if member.model and member.role != "encode")
    console.print()
    console.print(
        Text.assemble("Tandem is ready after ", f"{seconds:.1f} s: ", (options.url, "bold cyan")), soft_wrap=True
    )
    console.print()
    console.print(Text.assemble("  ", (curl_line(options.url, model), "green")), soft_wrap=True)
    console.print(Text.assemble("  ", (chat_line(options.url), "green")), soft_wrap=True)
    console.print()
    console.print(Text(f"Ctrl-C drains and stops Tandem. Logs: {log_folder}", style="dim"), soft_wrap=True)


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


def _other_tandem(options: UpOptions, port: int) -> str:
    """Return a hint if another Tandem listens on the port, else ""."""
    if port != options.port:
        return ""
    try:
        answer = httpx.get(f"{options.url}/v1/workers", timeout=1.0, trust_env=False)
        is_closed = answer.status_code == httpx.codes.UNAUTHORIZED and "cf-ai-req-id" in answer.headers
        is_tandem = is_closed or (answer.is_success and answer.json().get("object") == "list")
    except (httpx.HTTPError, ValueError, AttributeError):
        return ""
    return " by a Tandem that already runs (see `tandem status`)" if is_tandem else ""


POLL_SECONDS = 0.2


async def follow_logs(paths: Sequence[Path], console: Console) -> None:
    """Print each new line of `paths`, with the process's name, until cancelled."""
    readers = [LogReader(path) for path in paths]
    width = max(len(path.stem) for path in paths)
    try:
        while True:
            _print_new(readers, width, console)
            await asyncio.sleep(POLL_SECONDS)
    finally:
        _print_new(readers, width, console)


class LogReader:
    """Reads the new complete lines of a log, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._offset:  # the log was moved and emptied
                self._offset = 0
            log.seek(self._offset)
            complete = log.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return complete.decode("utf-8", errors="replace").split("\n")


def _print_new(readers: Sequence[LogReader], width: int, console: Console) -> None:
    for reader in readers:
        for line in reader.new_lines():
            console.print(Text.assemble((f"{reader.path.stem:<{width}} │ ", "dim"), line), soft_wrap=True)
