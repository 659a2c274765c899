"""The command `tandem fleet ...` (`python -m control_plane fleet ...`): join tokens, members, authorities, backups.

It works on the database with the control plane's secret, without a gateway: run it on a gateway's machine.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from control_plane.fleet_identity.addresses import JOIN_FOLDER, is_this_machine_only, known_addresses
from control_plane.fleet_identity.authorities import Trust
from control_plane.fleet_identity.backup import backup, restore
from control_plane.fleet_identity.certificate_authority import CertificateAuthority
from control_plane.fleet_identity.join_tokens import JOINING_ROLES
from control_plane.fleet_identity.members import Member
from control_plane.secrets import load_secret
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tandem_runtime import paths
from tandem_runtime.certificates.names import Identity
from tandem_runtime.enrolment.join_token import JoinToken, checked_addresses
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.settings import load_settings

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,7})([smhd])", re.ASCII)
_MAX_PASSPHRASE_BYTES = 4096


def main(argv: Sequence[str]) -> int:
    """Run `fleet ...` and return the exit status."""
    flags, rest = _parser().parse_known_args(argv)
    settings = load_settings(ControlPlaneSettings, "control", rest)
    try:
        return asyncio.run(_run(flags, settings))
    except TandemError as error:
        print(f"tandem fleet: {error.message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem fleet",
        description="Say who belongs to the fleet. Runs on a gateway's machine: the control plane's settings "
        "(--database-url, --state-dir, --secret, --config) select the database and the secret.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    token = actions.add_parser("token", help="make a join token for a machine, and print it once")
    token.add_argument("--role", required=True, metavar="ROLE", help=f"one of {', '.join(JOINING_ROLES)}")
    token.add_argument("--expires", type=_seconds, default="1h", metavar="TIME", help="such as 30m, 1h, 7d [1h]")
    token.add_argument("--uses", type=int, default=1, metavar="N", help="how many processes may join with it [1]")
    token.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="an enrolment port; may be repeated [that of the gateway that ran last with this state directory]",
    )
    _add_json(token)
    _add_json(actions.add_parser("list", help="list the authorities and the members"))
    revoke = actions.add_parser("revoke", help="refuse a member from now on, for good")
    revoke.add_argument("member", metavar="ID", help="the id of `tandem fleet list`, or the URI in the certificate")
    _add_rotation(actions.add_parser("rotate-ca", help="replace the fleet's authority in two steps"))
    for action, help in (
        ("backup", "write the authority to a file, encrypted with a passphrase"),
        ("restore", "read the authority from such a file"),
    ):
        file = actions.add_parser(action, help=help)
        file.add_argument("file", type=Path, metavar="FILE")
        file.add_argument("--passphrase-file", type=Path, metavar="FILE", help="its first line; asked for if left out")
        if action == "restore":
            file.add_argument("--replace", action="store_true", help="replace the fleet of the database")
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_rotation(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--switch", action="store_true", help="second step: issue by the new authority")
    step.add_argument("--remove-old", action="store_true", help="refuse the old authority's certificates at once")
    parser.add_argument("--force", action="store_true", help="with --switch: cut off members that do not trust it yet")


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give a number and a unit: 90s, 30m, 1h, 7d")
    return float(int(found[1]) * _UNITS[found[2]])


async def _run(flags: argparse.Namespace, settings: ControlPlaneSettings) -> int:
    state_dir = paths.state_dir(settings.state_dir or None, "--state-dir")
    secret = load_secret(settings.secret, state_dir)
    database = Database(database_url(settings.database_url, state_dir))
    try:
        await migrate(database)
        await database.set_clock()
        for line in await _act(flags, settings, state_dir, database, secret):
            print(line)
    except Unavailable as error:
        raise InvalidRequest(f"{database.problem or error.message}; see --database-url") from error
    finally:
        await database.close()
    return 0


async def _act(
    flags: argparse.Namespace, settings: ControlPlaneSettings, state_dir: Path, database: Database, secret: bytes
) -> list[str]:
    if flags.action == "restore":
        fleet = await restore(database, secret, _passphrase(flags, is_new=False), flags.file, replace=flags.replace)
        return [f"fleet {fleet} is restored; restart the gateways"]
    authority = CertificateAuthority(database, secret)
    trust = await authority.open()
    if flags.action == "backup":
        await backup(database, secret, _passphrase(flags, is_new=True), flags.file)
        return [f"fleet {trust.fleet} is written to {flags.file}; without its passphrase it cannot be read"]
    if flags.action == "token":
        addresses = _addresses(flags, settings, state_dir)
        token = await authority.new_token(flags.role, flags.expires, flags.uses, addresses)
        return _token_lines(token, flags, trust)
    if flags.action == "list":
        return _list_lines(trust, await authority.members(), database.now_ms(), as_json=flags.as_json)
    if flags.action == "revoke":
        return await _revoke(authority, trust, flags.member)
    return await _rotate(authority, flags)


def _addresses(flags: argparse.Namespace, settings: ControlPlaneSettings, state_dir: Path) -> tuple[str, ...]:
    """Return where a process joins: by --address, by the settings, or as the gateway of this machine wrote it."""
    found = flags.address or list(settings.enrolment_advertise) or known_addresses(state_dir / JOIN_FOLDER)
    if not found:
        raise InvalidRequest(
            f"no gateway has run with the state directory {state_dir}, so the address of its enrolment port is "
            "unknown; start it, or pass --address HOST:PORT"
        )
    return checked_addresses(found)


async def _revoke(authority: CertificateAuthority, trust: Trust, name: str) -> list[str]:
    found = [each.identity for each in await authority.members() if each.identity.id == name]
    try:
        identity = found[0] if found else Identity.parse(name)
    except ValueError as error:
        raise InvalidRequest(f"the fleet {trust.fleet} has no member {name!r}; see `tandem fleet list`") from error
    number = await authority.revoke(identity)
    return [f"{identity} is revoked (number {number} of the deny list)"]


async def _rotate(authority: CertificateAuthority, flags: argparse.Namespace) -> list[str]:
    if flags.remove_old:
        return [f"authority {await authority.remove_old_authority()} is trusted no more"]
    if flags.switch:
        trust = await authority.switch_authority(force=flags.force)
        leaves = _moment(trust.oldest.leaves_ms)
        return [
            f"authority {trust.issuing.number} issues from now on; authority {trust.oldest.number} leaves at {leaves}, "
            "when its last certificate has expired"
        ]
    number = await authority.add_authority()
    return [
        f"authority {number} is added; members trust it after their next renewal, which begins at once",
        "next    `tandem fleet rotate-ca --switch`, when `tandem fleet list` shows that all members trust it",
    ]


def _token_lines(token: JoinToken, flags: argparse.Namespace, trust: Trust) -> list[str]:
    pins = [f"sha256:{pin.hex()}" for pin in token.authorities]
    if flags.as_json:
        facts = {"token": token.text, "id": token.id, "role": flags.role, "uses": flags.uses, "authorities": pins}
        return [json.dumps(facts | {"addresses": token.addresses, "expires": _moment(_expiry(flags, trust))}, indent=2)]
    return [
        f"fleet      {trust.fleet}",
        f"role       {flags.role}, {'one process' if flags.uses == 1 else f'{flags.uses:,} processes'}",
        f"expires    {_moment(_expiry(flags, trust))}",
        *(f"authority  {pin}" for pin in pins),
        f"addresses  {', '.join(token.addresses)}",
        f"token      {token.text}",
        *_warnings(token),
        "The token is shown only once. Whoever has it can join as this role: pass it by environment or file, not in a "
        "flag.",
    ]


def _warnings(token: JoinToken) -> list[str]:
    if not is_this_machine_only(token.addresses):
        return []
    return [
        "The address is of this machine only. For other machines start the gateway with --grpc-listen 0.0.0.0:8643, or "
        "pass --address."
    ]


def _expiry(flags: argparse.Namespace, trust: Trust) -> int:
    seconds: float = flags.expires
    return trust.now_ms + round(seconds * 1000)


def _list_lines(trust: Trust, members: list[Member], now_ms: int, *, as_json: bool) -> list[str]:
    if as_json:
        return [json.dumps(_list_facts(trust, members, now_ms), indent=2)]
    lines = [f"fleet {trust.fleet}"]
    for authority in trust.trusted:
        state = "issues" if authority is trust.issuing else "trusted, issues nothing"
        leaves = "" if authority.leaves_ms is None else f", leaves {_moment(authority.leaves_ms)}"
        lines.append(f"authority {authority.number}  {state}{leaves}")
    for member in members:
        trusts = "" if member.bundle >= trust.bundle_number else "  does not trust the new authority yet"
        state = member.state(now_ms)
        lines.append(
            f"{member.identity.id}  {member.identity.role:10}  {state:7}  until {_moment(member.expires_ms)}  "
            f"{member.host}{trusts if state == 'active' else ''}"
        )
    return lines


def _list_facts(trust: Trust, members: list[Member], now_ms: int) -> dict[str, Any]:
    return {
        "fleet": trust.fleet,
        "bundle_number": trust.bundle_number,
        "authorities": [
            {"number": each.number, "issues": each is trust.issuing, "leaves": _moment(each.leaves_ms)}
            for each in trust.trusted
        ],
        "members": [
            {
                "id": each.identity.id,
                "role": each.identity.role,
                "uri": each.identity.uri,
                "host": each.host,
                "state": each.state(now_ms),
                "joined": _moment(each.joined_ms),
                "expires": _moment(each.expires_ms),
                "bundle_number": each.bundle,
            }
            for each in members
        ],
    }


def _passphrase(flags: argparse.Namespace, *, is_new: bool) -> str:
    """Return the passphrase from its file, or ask for it: a new one twice."""
    if flags.passphrase_file is not None:
        return _first_line(flags.passphrase_file)
    if not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask for the passphrase at; pass --passphrase-file")
    first = getpass.getpass("passphrase: ")
    if is_new and getpass.getpass("the same again: ") != first:
        raise InvalidRequest("the two passphrases differ; try again")
    return first


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_PASSPHRASE_BYTES)
        return content.decode().splitlines()[0] if content else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read --passphrase-file {path}: {error}") from error


def _moment(ms: int | None) -> str | None:
    return None if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
