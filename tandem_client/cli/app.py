"""The commands and flags of `tandem`."""

from __future__ import annotations

import importlib.metadata
import secrets
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from tandem_client import AI, TandemAPIError
from tandem_client.cli import accounts, fleet_command, operate
from tandem_client.cli import chat as chat_command
from tandem_client.cli import dev as dev_command
from tandem_client.cli import replay as replay_command
from tandem_client.cli import run as run_command
from tandem_client.cli import up as up_command
from tandem_client.cli.bounded_log import MAX_LOG_BYTES
from tandem_client.cli.chat import ChatOptions
from tandem_client.cli.control_socket import NotRunning, Refused
from tandem_client.cli.engines import Engine, vllm_python
from tandem_client.cli.plan import UpOptions
from tandem_client.cli.replace import ReplaceOptions, replace_workers
from tandem_client.cli.rolling import RollOptions
from tandem_client.cli.terminal import Url, fail, said, silence_stdout
from tandem_client.connection import DEFAULT_BASE_URL, Connection

app = typer.Typer(
    name="tandem",
    help="Serve large language models with separate prefill and decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with separate prefill and decode workers."""


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, Hub id or model name.", show_default="the built-in @tandem/demo"),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    fallback_model: Annotated[
        str | None,
        typer.Option(help="For development: the model that answers requests for models that are not loaded."),
    ] = None,
    embedding_model: Annotated[
        list[str] | None,
        typer.Option(help="An encoder beside the model, for embeddings, classes or rankings; may be repeated."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(help="Number of prefill workers; with 0, decode workers prefill too (aggregated).")
    ] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode workers.")] = 1,
    engine: Annotated[
        Engine, typer.Option(help="What computes: Tandem's own engine, or vLLM from a virtual environment of its own.")
    ] = Engine.TANDEM,
    host: Annotated[str, typer.Option(help="Address the HTTP gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP gateway.", min=1, max=65535)] = 8642,
    grpc_port: Annotated[int, typer.Option(help="Port where the workers register.", min=1, max=65535)] = 8643,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings file of the services.", show_default="tandem.toml in the current folder"),
    ] = None,
    insecure_http: Annotated[
        bool, typer.Option("--insecure-http", help="Allow a --host other than loopback, without TLS.")
    ] = False,
    insecure_plaintext: Annotated[
        bool,
        typer.Option(
            "--insecure-plaintext",
            "--insecure",
            help="No certificates: the processes talk in plain text, and --host may be any.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of all processes.")] = False,
    max_log_bytes: Annotated[
        int, typer.Option(help="Largest log of one process; what is older is kept once, in NAME.log.1.", min=65_536)
    ] = MAX_LOG_BYTES,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace the workers of the `tandem up` that runs at --port, one by one, new ones first. "
            "--model then chooses those of one model, by its name.",
        ),
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="With --replace: checkpoint folder or Hub id that the new workers load, with equal weights."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="With --replace: most seconds for the requests of an old worker to end.", min=0)
    ] = 120.0,
    start_seconds: Annotated[
        float, typer.Option(help="With --replace: most seconds for a new worker to load and to be proven.", min=1)
    ] = 600.0,
) -> None:
    """Start Tandem on this machine: control plane, KV service, prefill and decode workers.

    Divides cores and memory among the workers, and restarts a process that dies. Ctrl-C drains and stops all processes.
    With --replace, a running `tandem up` gets new workers from this command's release and settings.
    """
    if replace:
        roll = RollOptions(drain_seconds, start_seconds)
        checkpoint = _as_folder_or_hub_id(checkpoint, "--checkpoint")
        _replace_workers(ReplaceOptions(port, model, checkpoint, config, roll))
    if checkpoint is not None:
        fail("--checkpoint belongs to --replace; without it, --model names the checkpoint")
    try:
        interpreter = vllm_python(up_command.state_dir()) if engine is Engine.VLLM else ""
    except up_command.CannotStart as error:
        fail(str(error))
    options = UpOptions(
        model=_as_folder_or_hub_id(model, "--model"),
        served_model_name=served_model_name,
        fallback_model=fallback_model,
        embedding_models=tuple(
            _as_folder_or_hub_id(each, "--embedding-model") or each for each in embedding_model or ()
        ),
        num_prefill=prefill,
        num_decode=decode,
        vllm_python=interpreter,
        host=host,
        port=port,
        grpc_port=grpc_port,
        config=config,
        insecure_plaintext=insecure_plaintext,
        insecure_http=insecure_http,
        verbose=verbose,
        max_log_bytes=max_log_bytes,
        operator_token=secrets.token_urlsafe(32),
    )
    try:
        code = up_command.up(options, Console())
    except up_command.CannotStart as error:
        fail(str(error))
    raise typer.Exit(code)


def _replace_workers(options: ReplaceOptions) -> NoReturn:
    try:
        code = replace_workers(options, up_command.state_dir(), Console())
    except (NotRunning, Refused, up_command.CannotStart) as error:
        fail(str(error))
    raise typer.Exit(code)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the first one served")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt without the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the complete result as JSON, with usage.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print tokens as they arrive.")] = True,
    url: Url = None,
) -> None:
    """Send a prompt to a model and print the answer as it arrives."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        options = run_command.RunOptions(text, model, system, max_tokens, temperature, seed, raw, stream, as_json)
        with AI(url) as ai:
            run_command.run(ai, options, sys.stdout)
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the first one served")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    url: Url = None,
) -> None:
    """Chat with a model; /help lists the commands. In a pipe, each line is a message."""
    try:
        options = ChatOptions(model, system, temperature, max_tokens, seed)
        with AI(url) as ai:
            code = chat_command.chat(ai, options, lambda error: said(error, url))
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (TandemAPIError, ValueError) as error:
        fail(said(error, url))
    else:
        raise typer.Exit(code)


@app.command()
def dev(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder of the Worker, with its wrangler file.")
    ] = Path(),
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free port.", min=0, max=65535)] = 8787,
    environment: Annotated[
        str | None,
        typer.Option("--env", "-e", metavar="NAME", envvar="CLOUDFLARE_ENV", help="Environment of the wrangler file."),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(help="Address of Tandem.", show_default=f"$TANDEM_BASE_URL or {DEFAULT_BASE_URL}"),
    ] = None,
) -> None:
    """Run a Cloudflare Worker on this machine; Tandem answers its env.AI.

    Uses the wrangler of the Worker's folder, and reloads when a file changes. KV, D1, R2, Durable Objects and
    assets are local. TANDEM_TOKEN is sent with each call of env.AI. Ctrl-C stops the Worker.
    """
    try:
        connection = Connection.resolve(gateway, None, None)
        options = dev_command.DevOptions(folder.resolve(), connection, port, environment or None)
        code = dev_command.dev(options)
    except (dev_command.CannotRun, ValueError, OSError) as error:
        fail(str(error))
    raise typer.Exit(code)


@app.command(
    "fleet",
    help=fleet_command.HELP,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def manage_fleet(context: typer.Context) -> None:
    """Pass everything on, --help too."""
    try:
        raise typer.Exit(fleet_command.fleet(context.args or ["--help"]))
    except fleet_command.NotInstalled as error:
        fail(str(error))


@app.command(
    "trace",
    help=fleet_command.TRACE_HELP,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def export_trace(context: typer.Context) -> None:
    """Pass everything on, --help too."""
    try:
        raise typer.Exit(fleet_command.trace(context.args or ["--help"]))
    except fleet_command.NotInstalled as error:
        fail(str(error))


@app.command(
    "replay",
    help=replay_command.HELP,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def replay_trace(context: typer.Context) -> None:
    """Pass everything on, --help too."""
    try:
        raise typer.Exit(replay_command.replay(context.args or ["--help"]))
    except replay_command.NotInstalled as error:
        fail(str(error))


def _as_folder_or_hub_id(model: str | None, flag: str) -> str | None:
    """Make a folder's path absolute, so that the model's name does not depend on the current folder."""
    if model and model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        fail(f"{flag} {model} is not a folder; give one with config.json and safetensors, or a Hub id")
    return str(Path(model).expanduser().resolve()) if model and Path(model).expanduser().is_dir() else model


app.add_typer(operate.app)
app.add_typer(accounts.account_app, name="account")
app.add_typer(accounts.token_app, name="token")
app.command("usage")(accounts.usage)
