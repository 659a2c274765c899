"""The command `python -m control_plane account ...`, which creates the first account directly in the database."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from control_plane.accounts.store import Account, AccountStore, check_token
from control_plane.accounts.tokens import SCOPES, Token, now_ms
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tandem_runtime import paths
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.settings import load_settings

_DAY_MS = 86_400_000


def main(argv: Sequence[str]) -> int:
    """Run `account ...` and return the exit status. It works on the database itself, without a gateway."""
    flags, rest = _parser().parse_known_args(argv)
    settings = load_settings(ControlPlaneSettings, "control", rest)
    try:
        return asyncio.run(_run(flags, settings))
    except TandemError as error:
        print(f"control_plane: {error.message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m control_plane account",
        description="Create and list accounts. The control plane's settings (--database-url, --state-dir, --config) "
        "select the database.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="create an account and print its token, which is shown only once")
    create.add_argument("name", metavar="NAME", help="the account's id, as in URLs; it cannot be changed")
    _add_token_flags(create)
    token = actions.add_parser("token", help="create another token for an account")
    token.add_argument("name", metavar="NAME")
    _add_token_flags(token)
    actions.add_parser("list", help="list the accounts")
    for action, help in (("disable", "refuse an account's tokens"), ("enable", "accept an account's tokens again")):
        actions.add_parser(action, help=help).add_argument("name", metavar="NAME")
    return parser


def _days(text: str) -> float:
    days = float(text)
    if not math.isfinite(days):
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of days; leave the flag out for a token that never expires"
        )
    return days


def _add_token_flags(parser: argparse.ArgumentParser) -> None:
    default = "all for the first account, inference,usage for others"
    parser.add_argument("--scopes", metavar="SCOPE,...", help=f"from {', '.join(SCOPES)} [default: {default}]")
    parser.add_argument("--token-name", default="first", metavar="TEXT", help="the token's name in lists")
    parser.add_argument("--expires-days", type=_days, metavar="N", help="days until the token expires [default: never]")


async def _run(flags: argparse.Namespace, settings: ControlPlaneSettings) -> int:
    database = Database(database_url(settings.database_url, _state_dir(settings)))
    try:
        await migrate(database)
        for line in await _act(flags, AccountStore(database)):
            print(line)
    except Unavailable as error:
        raise InvalidRequest(f"{database.problem or error.message}; see --database-url") from error
    finally:
        await database.close()
    return 0


def _state_dir(settings: ControlPlaneSettings) -> Path:
    """Return the gateway's state directory. Create it if the gateway has never started."""
    return paths.state_dir(settings.state_dir or None, "--state-dir")


async def _act(flags: argparse.Namespace, store: AccountStore) -> list[str]:
    if flags.action == "list":
        return [_line(account) for account in await store.all()]
    if flags.action in ("disable", "enable"):
        return [_line(await store.change(flags.name, disabled=flags.action == "disable"))]
    is_first = not await store.exists_any()
    scopes = flags.scopes.split(",") if flags.scopes else (SCOPES if is_first else ("inference", "usage"))
    expires_ms = None if flags.expires_days is None else now_ms() + round(flags.expires_days * _DAY_MS)
    check_token(flags.token_name, scopes, expires_ms)
    if flags.action == "create":
        await store.create(flags.name)
    token, secret = await store.create_token(flags.name, flags.token_name, scopes, expires_ms)
    return _shown(token, secret)


def _shown(token: Token, secret: str) -> list[str]:
    scopes = ", ".join(scope for scope in SCOPES if scope in token.scopes)
    return [
        f"account  {token.account}",
        f"scopes   {scopes}",
        f"token    {secret}",
        "The token is shown only once. Clients send it as `Authorization: Bearer`; `tandem` reads TANDEM_TOKEN "
        "and TANDEM_ACCOUNT.",
    ]


def _line(account: Account) -> str:
    return f"{account.id}{'  (disabled)' if account.disabled_ms is not None else ''}"
