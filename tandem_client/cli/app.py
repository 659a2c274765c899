"""Which commands and flags does `tandem` have?"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live

from tandem_client import AI, TandemAPIError, TandemConnectionError
from tandem_client.cli import accounts, fleet, status
from tandem_client.cli import chat as chat_command
from tandem_client.cli import run as run_command
from tandem_client.cli import up as up_command
from tandem_client.cli.chat_session import ChatOptions
from tandem_client.cli.plan import UpOptions
from tandem_client.cli.worker_command import worker_app
from tandem_client.connection import DEFAULT_BASE_URL, Connection
from tandem_client.wire import error_of

app = typer.Typer(
    name="tandem",
    help="Serve large language models with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(accounts.account_app, name="account")
app.add_typer(accounts.token_app, name="token")
app.add_typer(worker_app, name="worker")
app.command("usage")(accounts.usage)

Url = Annotated[
    str | None,
    typer.Option("--url", help="Where Tandem answers.", show_default=f"$TANDEM_BASE_URL or {DEFAULT_BASE_URL}"),
]


def _version(wanted: bool) -> None:
    if wanted:
        try:
            number = importlib.metadata.version("tandem-serve")
        except importlib.metadata.PackageNotFoundError:
            number = "(a source tree that is not installed)"
        typer.echo(f"tandem {number}")
        raise typer.Exit


@app.callback()
def tandem(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode apart."""


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, Hub id or model name.", show_default="the built-in @tandem/demo"),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    fallback_model: Annotated[
        str | None,
        typer.Option(help="For development: the model that answers where another one is asked for that is not loaded."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(help="Prefill workers; 0: decode workers read the prompts too (aggregated).")
    ] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    host: Annotated[str, typer.Option(help="Address the HTTP gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP gateway.", min=1, max=65535)] = 8642,
    grpc_port: Annotated[int, typer.Option(help="Port the workers register at.", min=1, max=65535)] = 8643,
    config: Annotated[
        Path | None, typer.Option(help="Settings of the services.", show_default="tandem.toml if it is here")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow a --host beyond loopback, without TLS.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the processes log.")] = False,
) -> None:
    """Start Tandem on this machine: control plane, KV service, prefill and decode workers.

    Cores and memory are divided among the workers. What dies is started again; Ctrl-C drains.
    """
    options = UpOptions(
        model=_as_folder_or_hub_id(model),
        served_model_name=served_model_name,
        fallback_model=fallback_model,
        num_prefill=prefill,
        num_decode=decode,
        host=host,
        port=port,
        grpc_port=grpc_port,
        config=config,
        insecure=insecure,
        verbose=verbose,
        operator_token=secrets.token_urlsafe(32),
    )
    try:
        code = up_command.up(options, Console())
    except up_command.CannotStart as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the first one served")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message that goes before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt without the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON, usage included.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print tokens as they come.")] = True,
    url: Url = None,
) -> None:
    """Ask a model; tokens are printed as they come."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        options = run_command.RunOptions(text, model, system, max_tokens, temperature, seed, raw, stream, as_json)
        with AI(url) as ai:
            run_command.run(ai, options, sys.stdout)
    except BrokenPipeError:
        _silence_stdout()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (TandemAPIError, ValueError) as error:
        _fail(_explain(error, url))


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the first one served")] = None,
    system: Annotated[str | None, typer.Option(help="System message that goes before the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    url: Url = None,
) -> None:
    """Chat with a model; /help lists the commands. From a pipe each line is a message."""
    try:
        options = ChatOptions(model, system, temperature, max_tokens, seed)
        with AI(url) as ai:
            code = chat_command.chat(ai, options, lambda error: _explain(error, url))
    except BrokenPipeError:
        _silence_stdout()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (TandemAPIError, ValueError) as error:
        _fail(_explain(error, url))
    else:
        raise typer.Exit(code)


@app.command("status")
def show_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print what the control plane says, as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew each second, until Ctrl-C.")] = False,
    url: Url = None,
) -> None:
    """Show the fleet: who is there, its load, its KV blocks and its memory."""
    try:
        if as_json:
            typer.echo(json.dumps(_workers(url), indent=2))
        elif watch:
            _watch(url)
        else:
            _console().print(_fleet_view(url))
    except KeyboardInterrupt:
        return
    except (TandemAPIError, ValueError) as error:
        _fail(_explain(error, url))


def _watch(url: str | None) -> None:
    console = _console()
    if not console.is_terminal:  # a pipe gets one picture after another
        while True:
            console.print(_fleet_view(url))
            time.sleep(1.0)
    with Live(_fleet_view(url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(_fleet_view(url), refresh=True)


def _fleet_view(url: str | None) -> Group:
    members = fleet.parse_fleet(_workers(url))
    return status.fleet_view(members, Connection.resolve(url, None, "default").base_url)


def _workers(url: str | None) -> dict[str, object]:
    connection = Connection.resolve(url, None, "default")
    with httpx.Client(timeout=5.0, **connection.client_options) as client:
        try:
            answer = client.send(client.build_request(**fleet.workers_options(connection)))
        except httpx.TransportError as error:
            raise connection.failed(error) from error
    if not answer.is_success:
        raise error_of(answer.status_code, answer.headers, answer.content)
    document: dict[str, object] = answer.json()
    return document


def _console() -> Console:
    """Return where tables go: a file or a pipe has no width of its own, and needs no folding."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def _as_folder_or_hub_id(model: str | None) -> str | None:
    """Make a folder's path absolute, so that a worker's name for it does not depend on where it was started."""
    if model and model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        _fail(f"--model {model} is not a folder; give one with config.json and safetensors, or a Hub id")
    return str(Path(model).expanduser().resolve()) if model and Path(model).expanduser().is_dir() else model


def _silence_stdout() -> None:
    """Whoever read us has enough (`| head`); leaving the stream has cancelled the rest.

    Python would complain once more as it flushes at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception, url: str | None) -> str:
    if isinstance(error, TandemConnectionError) and isinstance(error.__cause__, httpx.ConnectError):
        return f"no Tandem at {Connection.resolve(url, None, 'default').base_url}; start one with `tandem up`"
    return str(error)


def _fail(message: str) -> None:
    typer.secho(f"tandem: {message}", fg="red" if sys.stderr.isatty() else None, err=True)
    raise typer.Exit(1)
