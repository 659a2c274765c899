"""Two gateways that start at the same moment on one empty PostgreSQL are one fleet."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.storage import migrate
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import members
from tandem_runtime.certificates.files import read_certificate
from tandem_runtime.certificates.names import identity_in, parse_certificate
from tandem_runtime.enrolment.membership import EXIT_REFUSED
from tests.control_plane.postgres import Postgres, running_postgres
from tests.ports import free_ports
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.machine import Machine

pytestmark = pytest.mark.services


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


async def test_gateways_that_start_at_once_admit_serve_and_revoke_as_one_fleet(
    postgres: Postgres, tmp_path: Path
) -> None:
    url, secret = postgres.new_database(), secrets.token_hex(32)
    machines = [
        Machine(tmp_path / name, TANDEM_SECRET=secret, TANDEM_CONTROL_DATABASE_URL=url) for name in ("one", "other")
    ]
    one, other = machines
    http_ports, grpc_ports, enrolment_ports = (free_ports(2) for _ in range(3))
    control = ("--control", ",".join(f"127.0.0.1:{port}" for port in grpc_ports))
    gateways = [
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) for port in http_ports
    ]

    def logs() -> str:
        return "\n\n".join(machine.end_of_log() for machine in machines)

    async def serving() -> list[set[str]]:
        return [await _ready(gateway) for gateway in gateways]

    async def answers() -> set[str]:
        """Return what the gateways answer, through each of them at once."""
        body = {"model": "@tandem/demo", "prompt": "What is a KV cache?", "max_tokens": 8, "temperature": 0}
        replies = await asyncio.gather(*(gateway.post("/v1/completions", json=body) for gateway in gateways))
        assert [reply.status_code for reply in replies] == [200, 200], [reply.text for reply in replies]
        return {reply.json()["choices"][0]["text"] for reply in replies}

    async def both_have(ids: set[str]) -> bool:
        return await serving() == [ids, ids]

    async def both_have_number(number: int) -> bool:
        first, second = await serving()
        return first == second and len(first) == number

    try:
        # 1. Both find an empty database, and wait for the same lock on it.
        async with _locked(url) as num_waiting:
            for machine, http, grpc, enrolment in zip(machines, http_ports, grpc_ports, enrolment_ports, strict=True):
                machine.start(
                    "control_plane",
                    *("--listen", f"127.0.0.1:{http}", "--grpc-listen", f"127.0.0.1:{grpc}"),
                    *("--enrolment-listen", f"127.0.0.1:{enrolment}"),
                )

            async def both_wait() -> bool:
                return await num_waiting() == 2

            await until(both_wait, 60, logs)

        # 2. One of them has made the fleet; the other is a member of it.
        await until(lambda: all(" listening " in machine.log() for machine in machines), 60, logs)
        assert sum(machine.log().count("fleet_made") for machine in machines) == 1
        files = [read_certificate(machine.state_dir / "certificates" / "gateway") for machine in machines]
        ours = [identity_in(parse_certificate(each.certificate)) for each in files]
        assert ours[0].fleet == ours[1].fleet and ours[0].id != ours[1].id
        assert files[0].bundle == files[1].bundle

        # 3. A worker that joined at one of them serves both.
        other.start("decode_svc", *control, *SMALL)
        await until(lambda: both_have_number(1), 90, logs)
        [[second], _] = await serving()
        [text] = await answers()

        # 4. So does one that joined at the other.
        one.start("decode_svc", *control, *SMALL)
        await until(lambda: both_have_number(2), 90, logs)
        [first] = (await serving())[0] - {second}

        # 5. Revoked on one machine, a worker is out at both gateways, and the rest of the fleet serves.
        assert await _members(url) == {ours[0].id, ours[1].id, first, second}
        revoked = other.running["decode_svc"]
        await one.call("control_plane", "fleet", "revoke", second)
        await until(lambda: both_have({first}), 30, logs)
        assert await asyncio.to_thread(revoked.wait, 60) == EXIT_REFUSED
        assert await answers() == {text}
    finally:
        for gateway in gateways:
            await gateway.aclose()
        for machine in reversed(machines):
            await machine.stop()


@asynccontextmanager
async def _locked(url: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Hold the lock that a gateway takes before its first look at the database; yield what counts those that wait."""
    database = Database(database_url(url, None))  # type: ignore[arg-type]

    async def num_waiting() -> int:
        async with database.each() as connection:
            return int(await connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0)

    try:
        async with database.begin() as connection:
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(migrate._LOCK_KEY)))
            yield num_waiting
    finally:
        await database.close()


async def _members(url: str) -> set[str]:
    database = Database(database_url(url, None))  # type: ignore[arg-type]
    try:
        async with database.each() as connection:
            return set((await connection.execute(sa.select(members.c.id))).scalars())
    finally:
        await database.close()


async def _ready(gateway: httpx.AsyncClient) -> set[str]:
    """Return the ids of the workers that a gateway gives requests to."""
    try:
        found: list[dict[str, Any]] = (await gateway.get("/v1/workers")).json()["data"]
    except httpx.TransportError:
        return set()
    return {worker["id"] for worker in found if worker["state"] == "ready"}
