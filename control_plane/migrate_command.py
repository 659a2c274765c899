"""The command `python -m control_plane migrate`, which shows the database's revision, migrates it or takes it back."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import HEAD, current, migrate, revisions, take_back
from tandem_runtime import paths
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.settings import load_settings


def main(argv: Sequence[str]) -> int:
    """Run `migrate ...` and return the exit status. It works on the database itself, without a gateway."""
    flags, rest = _parser().parse_known_args(argv)
    settings = load_settings(ControlPlaneSettings, "control", rest)
    try:
        print(asyncio.run(_run(flags, settings)))
    except TandemError as error:
        print(f"control_plane: {error.message}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m control_plane migrate",
        description="Show the database's revision. A gateway migrates by itself when it starts. The control plane's "
        "settings (--database-url, --state-dir, --config) select the database.",
        allow_abbrev=False,
    )
    parser.add_argument("--to", metavar="REVISION", help="migrate to the newest revision, or take later ones back")
    parser.add_argument(
        "--drop", action="store_true", help="needed to take revisions back: drops tables and columns with their rows"
    )
    return parser


async def _run(flags: argparse.Namespace, settings: ControlPlaneSettings) -> str:
    database = Database(database_url(settings.database_url, paths.state_dir(settings.state_dir or None, "--state-dir")))
    try:
        return await _act(flags.to, database, may_drop=flags.drop)
    except Unavailable as error:
        raise InvalidRequest(f"{database.problem or error.message}; see --database-url") from error
    finally:
        await database.close()


async def _act(revision: str | None, database: Database, *, may_drop: bool) -> str:
    before = await current(database)
    if revision is None:
        return f"the database is at revision {before or 'none'}; this version has {', '.join(revisions())}"
    if revision == HEAD and (before is None or before < HEAD):
        await migrate(database)
        return f"the database went from revision {before or 'none'} to {HEAD}"
    is_back = before is not None and revision in revisions() and revision < before
    if is_back and not may_drop:
        raise InvalidRequest(
            f"taking revisions {before} to {revision} back drops tables and columns with their rows; make a backup, "
            "end all gateways of the newer release, then add --drop"
        )
    found = await take_back(database, revision)
    return f"the database went from revision {found} back to {revision}"
