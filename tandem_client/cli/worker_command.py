"""Which commands are there for Cloudflare Workers?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem_client.cli import worker_dev
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import ConfigUnusable
from tandem_client.cli.worker_process import WorkerdEnded
from tandem_client.cli.worker_view import View
from tandem_client.connection import DEFAULT_BASE_URL, Connection

worker_app = typer.Typer(help="Run Cloudflare Workers whose env.AI is Tandem.", no_args_is_help=True)


@worker_app.callback()
def worker() -> None:
    """Run Cloudflare Workers whose env.AI is Tandem."""


@worker_app.command()
def dev(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The Worker's folder, with its wrangler file.")
    ] = Path(),
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: a free one.", min=0, max=65535)] = 8787,
    environment: Annotated[
        str | None,
        typer.Option("--env", "-e", metavar="NAME", envvar="CLOUDFLARE_ENV", help="Environment of the wrangler file."),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(help="Where Tandem answers.", show_default=f"$TANDEM_BASE_URL or {DEFAULT_BASE_URL}"),
    ] = None,
    ignore_unsupported: Annotated[
        bool, typer.Option("--ignore-unsupported", help="Go on without bindings that there are not here.")
    ] = False,
) -> None:
    """Run a Worker in workerd with its env.AI answered by Tandem; what changes in its folder is loaded at once.

    The token in TANDEM_TOKEN goes with every call of env.AI. Ctrl-C ends it.
    """
    try:
        connection = Connection.resolve(gateway, None, None)
        upstream = Upstream(connection.base_url, connection.token)
        options = worker_dev.DevOptions(folder.resolve(), upstream, port, environment or None, ignore_unsupported)
        asyncio.run(worker_dev.dev(options, View(Console(highlight=False))))
    except (ConfigUnusable, WorkerdEnded, ValueError, OSError) as error:
        typer.secho(f"tandem: {error}", fg="red" if sys.stderr.isatty() else None, err=True)
        raise typer.Exit(1) from None
