"""The command `tandem trace export` (`python -m control_plane trace export`): yesterday's requests as a trace.

It reads the explanations that gateways keep in the database, without a gateway: run it on a gateway's machine.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import sqlalchemy as sa

from control_plane.explain.trace_export import TraceLines
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import explanations
from tandem_runtime import paths
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.settings import load_settings

_ROWS = 500
"""Of one query: others use the database between two."""
_HOUR_MS = 3_600_000


def main(argv: Sequence[str]) -> int:
    """Run `trace ...` and return the exit status."""
    flags, rest = _parser().parse_known_args(argv)
    settings = load_settings(ControlPlaneSettings, "control", rest)
    try:
        asyncio.run(_export(flags, settings))
    except (TandemError, OSError) as error:
        print(f"tandem trace: {error.message if isinstance(error, TandemError) else error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem trace",
        description="Write requests that gateways have explained as a trace, for `tandem replay`. No text leaves the "
        "database, and no hash. The control plane's settings (--database-url, --state-dir, --config) select it.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    export = actions.add_parser("export", help="write arrivals, lengths, shared beginnings, routes and outcomes")
    export.add_argument("--hours", type=float, metavar="N", help="the last hours [all that is kept]")
    export.add_argument("--model", metavar="ID", help="requests of this model [all]")
    export.add_argument("--out", type=Path, metavar="FILE", help="the file [stdout]")
    return parser


async def _export(flags: argparse.Namespace, settings: ControlPlaneSettings) -> None:
    database = Database(database_url(settings.database_url, paths.state_dir(settings.state_dir or None, "--state-dir")))
    try:
        since_ms = 0 if flags.hours is None else database.now_ms() - int(flags.hours * _HOUR_MS)
        if flags.out is None:
            written = await _write(database, since_ms, flags.model, sys.stdout)
        else:
            with flags.out.open("w", encoding="utf-8") as file:
                written = await _write(database, since_ms, flags.model, file)
    except Unavailable as error:
        raise InvalidRequest(f"{database.problem or error.message}; see --database-url") from error
    finally:
        await database.close()
    print(written, file=sys.stderr)


async def _write(database: Database, since_ms: int, model: str | None, file: TextIO) -> str:
    """Write the lines; return what was written, as a sentence."""
    trace, num_lines = TraceLines(), 0
    async for rows in _explanations(database, since_ms, model):
        for line in trace.lines(rows):
            file.write(line + "\n")
            num_lines += 1
    return f"{num_lines} requests written, {trace.num_left_out} left out: they have no prompt or no answer"


async def _explanations(database: Database, since_ms: int, model: str | None) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield documents by time, some hundred at a time."""
    columns = explanations.c
    after = since_ms - 1, ""
    while True:
        query = (
            sa.select(columns.created_ms, columns.request_id, columns.document)
            .where(sa.tuple_(columns.created_ms, columns.request_id) > sa.tuple_(*map(sa.literal, after)))
            .order_by(columns.created_ms, columns.request_id)
            .limit(_ROWS)
        )
        if model is not None:
            query = query.where(columns.model == model)
        rows = await database.run(functools.partial(_read, query), single=True)
        if not rows:
            return
        yield [msgspec.json.decode(row.document) for row in rows]
        after = rows[-1].created_ms, rows[-1].request_id


def _read(query: sa.Select[tuple[int, str, str]], connection: sa.Connection) -> Sequence[sa.Row[tuple[int, str, str]]]:
    return connection.execute(query).all()
