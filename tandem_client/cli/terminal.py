"""What all commands share: the option --url, the console, and how errors are said."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console

from tandem_client.connection import DEFAULT_BASE_URL, Connection
from tandem_client.errors import TandemConnectionError

Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of Tandem.", show_default=f"$TANDEM_BASE_URL or {DEFAULT_BASE_URL}"),
]


def console() -> Console:
    """Return the console for tables. A file or a pipe has no width, so lines are not folded."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def harmless(text: str, keep: str = "") -> str:
    """Return a text of strangers without the characters that command a terminal; those in `keep` stay."""
    return "".join(each if each.isprintable() or each in keep else " " for each in text)


def silence_stdout() -> None:
    """Discard further output, after the reader of the pipe has closed it (`| head`).

    Otherwise Python prints an error when it flushes stdout at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def said(error: Exception, url: str | None) -> str:
    """Return an error as a sentence for the operator."""
    if isinstance(error, TandemConnectionError) and isinstance(error.__cause__, httpx.ConnectError):
        return f"no Tandem at {Connection.resolve(url, None, 'default').base_url}; start one with `tandem up`"
    return str(error)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    typer.secho(f"tandem: {message}", fg="yellow" if sys.stderr.isatty() else None, err=True)


def fail(message: str) -> NoReturn:
    """Print an error to stderr and end with 1."""
    typer.secho(f"tandem: {message}", fg="red" if sys.stderr.isatty() else None, err=True)
    raise typer.Exit(1)
