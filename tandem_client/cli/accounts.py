"""`tandem account`, `tandem token` and `tandem usage`: accounts, tokens, limits and usage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tandem_client.connection import DEFAULT_BASE_URL, Connection
from tandem_client.errors import TandemAPIError
from tandem_client.wire import request_headers, result_of

_ACCOUNTS = "/client/v4/accounts"
_PER_PAGE = 1000

account_app = typer.Typer(help="Create accounts and set their limits (needs an admin token).", no_args_is_help=True)
token_app = typer.Typer(help="Create, list and revoke API tokens (needs an admin token).", no_args_is_help=True)

Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of Tandem.", show_default=f"$TANDEM_BASE_URL or {DEFAULT_BASE_URL}"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
AccountName = Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account's id.")]
Limit = Annotated[str | None, typer.Option(metavar="N", help='A whole number, or "none" for no limit.')]


@account_app.command("create")
def create_account(
    name: Annotated[str, typer.Argument(help="The account's id, as in URLs; it cannot be changed.")],
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent_requests: Limit = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create an account; create its token with `tandem token create`."""
    limits = _limits(requests_per_minute, tokens_per_minute, concurrent_requests)
    _show(_call(url, "POST", _ACCOUNTS, {"name": name, "limits": limits}), as_json, _account_line)


@account_app.command("list")
def list_accounts(as_json: Json = False, url: Url = None) -> None:
    """List the accounts and their limits."""
    accounts = _all(url, _ACCOUNTS)
    if as_json:
        typer.echo(json.dumps(accounts, indent=2))
        return
    names = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
    rows = [
        (entry["id"], entry["created_on"], *(_number(entry["limits"][name]) for name in names), _state(entry))
        for entry in accounts
    ]
    _table(("account", "created", "requests/min", "tokens/min", "at once", ""), rows)


@account_app.command("limit")
def limit_account(
    name: AccountName,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent_requests: Limit = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Change limits of an account; limits without a flag do not change."""
    limits = _limits(requests_per_minute, tokens_per_minute, concurrent_requests)
    _show(_call(url, "PATCH", _path(name), {"limits": limits}), as_json, _account_line)


@account_app.command("disable")
def disable_account(name: AccountName, url: Url = None) -> None:
    """Disable an account: its tokens are refused."""
    _show(_call(url, "PATCH", _path(name), {"disabled": True}), False, _account_line)


@account_app.command("enable")
def enable_account(name: AccountName, url: Url = None) -> None:
    """Enable an account: its tokens are accepted again."""
    _show(_call(url, "PATCH", _path(name), {"disabled": False}), False, _account_line)


@token_app.command("create")
def create_token(
    account: AccountName,
    name: Annotated[str, typer.Option(help="The token's name in lists.")] = "token",
    scopes: Annotated[
        str, typer.Option(metavar="SCOPE,...", help="Any of inference, usage, admin.")
    ] = "inference,usage",
    expires_days: Annotated[
        float | None, typer.Option(help="Days until the token expires.", show_default="never")
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a token and print it; it is not shown again."""
    expires_on = None if expires_days is None else (datetime.now(UTC) + timedelta(days=expires_days)).isoformat()
    body = {"name": name, "scopes": scopes.split(","), "expires_on": expires_on}
    _show(_call(url, "POST", _path(account, "tokens"), body), as_json, lambda made: made["value"])


@token_app.command("list")
def list_tokens(account: AccountName, as_json: Json = False, url: Url = None) -> None:
    """List an account's tokens, without their secrets, which are not stored."""
    tokens = _all(url, _path(account, "tokens"))
    if as_json:
        typer.echo(json.dumps(tokens, indent=2))
        return
    rows = [
        (
            *(entry["id"], entry["name"], ", ".join(entry["scopes"]), entry["status"]),
            *(entry["expires_on"] or "never", entry["last_used_on"] or "never"),
        )
        for entry in tokens
    ]
    _table(("token", "name", "scopes", "status", "expires", "last used"), rows)


@token_app.command("revoke")
def revoke_token(account: AccountName, token_id: Annotated[str, typer.Argument()], url: Url = None) -> None:
    """Revoke a token for ever."""
    _show(
        _call(url, "DELETE", _path(account, "tokens", token_id)), False, lambda ended: f"token {ended['id']} is revoked"
    )


@token_app.command("roll")
def roll_token(account: AccountName, token_id: Annotated[str, typer.Argument()], url: Url = None) -> None:
    """Replace a token's secret and print the new one; the old one is refused from then on."""
    _show(_call(url, "PUT", _path(account, "tokens", token_id, "value")), False, str)


@token_app.command("verify")
def verify_token(as_json: Json = False, url: Url = None) -> None:
    """Check the token in TANDEM_TOKEN."""
    result = _call(url, "GET", "/client/v4/user/tokens/verify")
    _show(result, as_json, lambda token: f"token {token['id']} is {token['status']}")


def usage(
    account: Annotated[
        str | None,
        typer.Argument(metavar="ACCOUNT", help="The account's id.", show_default="$TANDEM_ACCOUNT or default"),
    ] = None,
    since: Annotated[str | None, typer.Option("--from", help="First day, such as 2026-11-01.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Last day.", show_default="today")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show an account's usage by day and model."""
    days = {name: day for name, day in (("from", since), ("to", until)) if day is not None}
    account = account or os.environ.get("TANDEM_ACCOUNT") or "default"
    entries = _all(url, _path(account, "ai", "usage"), days)
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    rows = [
        (entry["date"], entry["model"], *(f"{entry[name]:,}" for name in names), f"{entry['neurons']:,.3f}")
        for entry in entries
    ]
    titles: tuple[str, ...] = ("day", "model", "requests", "prompt", "cached", "completion", "neurons")
    if any(entry.get("seams") for entry in entries):  # else a column of zeros
        titles = (*titles, "seams")
        rows = [(*row, f"{entry.get('seams', 0):,}") for row, entry in zip(rows, entries, strict=True)]
    _table(titles, rows)


def _limits(requests: str | None, tokens: str | None, concurrent: str | None) -> dict[str, int | None]:
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "concurrent_requests": concurrent}
    return {name: _limit(name, text) for name, text in limits.items() if text is not None}


def _limit(name: str, text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdecimal():
        _fail(f'--{name.replace("_", "-")} is {text!r}; give a whole number, or "none" for no limit')
    return int(text)


def _path(account: str, *parts: str) -> str:
    return "/".join((_ACCOUNTS, *(quote(part, safe="") for part in (account, *parts))))


def _all(url: str | None, path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return all pages of a list."""
    entries: list[dict[str, Any]] = []
    page = 1
    while True:
        paging = {"page": str(page), "per_page": str(_PER_PAGE)}
        found = _call(url, "GET", path, query={**(query or {}), **paging})
        entries += found
        if len(found) < _PER_PAGE:
            return entries
        page += 1


def _call(
    url: str | None,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, str] | None = None,
) -> Any:
    """Return the `result` of a call; if the server refuses, print its message and exit."""
    try:
        connection = Connection.resolve(url, None, "default")
        headers = request_headers(connection.token, None)
        with httpx.Client(timeout=30.0, **connection.client_options) as client:
            try:
                answer = client.request(method, path, json=body, params=query, headers=headers)
            except httpx.TransportError as error:
                raise connection.failed(error) from error
        return result_of(answer.status_code, answer.headers, answer.content)
    except (TandemAPIError, ValueError) as error:
        _fail(str(error))


def _show(result: Any, as_json: bool, line: Callable[[Any], str]) -> None:
    typer.echo(json.dumps(result, indent=2) if as_json else line(result))


def _account_line(account: Mapping[str, Any]) -> str:
    limits = [f"{name.replace('_', ' ')}: {_number(value)}" for name, value in account["limits"].items()]
    return f"account {account['id']}{_state(account)}  {', '.join(limits)}"


def _state(account: Mapping[str, Any]) -> str:
    return "  (disabled)" if account["disabled"] else ""


def _number(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    console = Console()
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    (console if console.is_terminal else Console(width=180)).print(table)


def _fail(message: str) -> Any:
    typer.secho(f"tandem: {message}", fg="red", err=True)
    raise typer.Exit(1)
