"""A revoked member is denied under a number, at every gateway, also while the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from control_plane.fleet_identity.denials import DenyListReader
from control_plane.storage.migrate import migrate
from control_plane.storage.tables import denials
from tandem_runtime.certificates.names import Identity
from tandem_runtime.errors import InvalidRequest, Unauthenticated, Unavailable
from tests.control_plane.fleet_identity.world import World, new_key, on_both


@on_both
async def test_a_revoked_member_gets_no_certificate_by_any_way(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    assert await world.authority.revoke(issued.identity) == 1
    assert await world.authority.revoke(issued.identity) == 1
    (member,) = await world.authority.members()
    assert member.state(world.database.now_ms()) == "revoked"
    with pytest.raises(Unauthenticated, match=r"is revoked.*fleet token --role decode"):
        await world.renew(issued, key)
    with pytest.raises(Unauthenticated, match="is revoked"):
        await world.authority.issue_again(issued.identity, key.public_key())
    world.pass_hours(24 * 20)
    with pytest.raises(Unauthenticated, match="is revoked"):
        await world.renew(issued, key)
    assert (await world.join()).identity != issued.identity


@on_both
async def test_denials_made_at_once_have_numbers_without_gaps(world: World, open_world: Callable[..., World]) -> None:
    worlds = [world, open_world(), open_world(), open_world()]
    identities = [(await world.join()).identity for _ in range(8)]
    numbers = await asyncio.gather(*(worlds[n % 4].authority.revoke(each) for n, each in enumerate(identities)))
    assert sorted(numbers) == list(range(1, 9))


@on_both
async def test_a_reader_gives_each_process_what_it_lacks(world: World) -> None:
    reader = DenyListReader(world.database)
    assert not await reader.refresh()
    assert reader.since(0).number == 0 and list(reader.since(0).ids) == []
    first, second = (await world.join()).identity, (await world.join()).identity
    await world.authority.revoke(first)
    assert await reader.refresh() and not await reader.refresh()
    assert (reader.since(0).number, list(reader.since(0).ids)) == (1, [first.id])
    await world.authority.revoke(second)
    assert await reader.refresh()
    assert list(reader.since(1).ids) == [second.id] and list(reader.since(2).ids) == []
    assert list(reader.since(0).ids) == [first.id, second.id]
    assert list(reader.since(3).ids) == [first.id, second.id], "a number from elsewhere: all"
    # When no certificate of theirs can be renewed any more, they need not be named.
    world.pass_hours(24 * 32)
    assert list(reader.since(0).ids) == []
    await world.authority.clean()
    assert (await world.authority.revoke((await world.join()).identity)) == 3


async def test_without_the_database_the_last_list_stands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DenyListReader(world.database)
    identity = (await world.join()).identity
    await world.authority.revoke(identity)
    await reader.refresh()

    def away() -> None:
        raise Unavailable("the database could not be reached; try again")

    with monkeypatch.context() as patch:
        patch.setattr(world.database, "check", away)
        with pytest.raises(Unavailable):
            await reader.refresh()
    assert list(reader.since(0).ids) == [identity.id]


async def test_a_reader_goes_on_when_the_database_is_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.fleet_identity.denials.READ_SECONDS", 0.01)
    reader, is_away, num_refused, has_refused = DenyListReader(world.database), [True], [0], asyncio.Event()
    identity = (await world.join()).identity
    await world.authority.revoke(identity)

    def check() -> None:
        if is_away[0]:
            num_refused[0] += 1
            if num_refused[0] == 3:
                has_refused.set()
            raise Unavailable("the database could not be reached; try again")

    monkeypatch.setattr(world.database, "check", check)
    refresh, has_read = reader.refresh, asyncio.Event()

    async def refresh_and_tell() -> bool:
        if found := await refresh():
            has_read.set()
        return found

    monkeypatch.setattr(reader, "refresh", refresh_and_tell)
    with capture_logs() as lines:
        reading = asyncio.create_task(reader.run())
        await asyncio.wait_for(has_refused.wait(), 30)
        is_away[0] = False
        await asyncio.wait_for(has_read.wait(), 30)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert list(reader.since(0).ids) == [identity.id]
    assert [line["event"] for line in lines].count("deny_list_not_read") == 1


async def test_an_older_database_in_its_place_takes_nothing_back(world: World) -> None:
    reader = DenyListReader(world.database)
    first, second = (await world.join()).identity, (await world.join()).identity
    await world.authority.revoke(first)
    await world.authority.revoke(second)
    await reader.refresh()
    async with world.database.begin() as connection:
        await connection.execute(denials.delete().where(denials.c.number == 2))
    await reader.refresh()
    assert reader.number == 1 and set(reader.since(0).ids) == {first.id, second.id}


async def test_only_members_of_this_fleet_are_revoked(world: World, open_world: Callable[..., World]) -> None:
    with pytest.raises(InvalidRequest, match="is of another fleet"):
        await world.authority.revoke(Identity("0" * 16, "decode", "1" * 16))
    unknown = Identity((await world.authority.trust()).fleet, "decode", "1" * 16)
    assert await world.authority.revoke(unknown) == 1  # its row may be lost, its certificate not


async def test_a_database_without_a_fleet_is_named(open_world: Callable[..., World]) -> None:
    world = open_world()
    await migrate(world.database)
    with pytest.raises(InvalidRequest, match="has no fleet"):
        await world.authority.trust()
