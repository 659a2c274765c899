"""A disk that becomes read-only while a gateway starts, and is well again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.surroundings import mount_namespace

_PROGRAM = """
import asyncio, sys
from pathlib import Path

import sqlalchemy as sa

from control_plane.storage.database import Database, database_url
from tandem_runtime.errors import Unavailable
from tests.chaos.small_disk import SmallDisk

TABLE = sa.Table("numbers", sa.MetaData(), sa.Column("number", sa.Integer))
found = []
disk = SmallDisk(Path(sys.argv[1]), 4 << 20)
url = database_url("", disk.folder)


def insert(connection):
    connection.execute(TABLE.insert(), {"number": 1})


async def write(database):
    # In a transaction, with single statements in the thread of requests, and with a connection of its own.
    async def begin():
        async with database.begin() as connection:
            await connection.run_sync(insert)

    for work in (begin, lambda: database.run(insert, single=True), lambda: database.run(insert)):
        database._down_until = 0.0  # each is tried
        try:
            await work()
        except Unavailable:
            found.append("refused")
        else:
            found.append("written")


async def main():
    before = Database(url)
    await before.run(TABLE.create)
    during = Database(url)  # a gateway that finds the disk read-only does not start
    with disk.read_only():
        await write(during)
    await write(during)
    count = sa.select(sa.func.count()).select_from(TABLE)
    print(*found, await during.report(lambda connection: connection.scalar(count)))
    await during.close()
    await before.close()


asyncio.run(main())
disk.unmount()
"""


def test_connections_that_were_opened_on_a_read_only_disk_write_once_the_disk_is_well(tmp_path: Path) -> None:
    namespace = mount_namespace()
    if not namespace:
        pytest.skip("this process gets no mount namespace")
    command = [*namespace, sys.executable, "-c", _PROGRAM, str(tmp_path / "disk")]
    found = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1:] == ["refused refused refused written written written 3"], (
        found.stdout + found.stderr
    )
