"""A join token admits one role, as often as it says, until it expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from control_plane.fleet_identity import join_tokens
from control_plane.fleet_identity.certificates import authority_digest
from control_plane.fleet_identity.join_tokens import MAX_FAILURES
from control_plane.storage.tables import join_tokens as table
from tandem_runtime.enrolment.join_token import JoinToken, encoded
from tandem_runtime.errors import InvalidRequest, Unauthenticated
from tests.control_plane.fleet_identity.world import ADDRESSES, World, new_key, on_both, request_of


async def enrol(world: World, credential: str, role: str = "decode") -> str:
    return (await world.authority.enrol(credential, role, request_of(new_key()), "")).identity.id


async def test_a_token_is_used_once(world: World) -> None:
    credential = await world.credential()
    await enrol(world, credential)
    with pytest.raises(Unauthenticated, match=r"was used once, which is its limit.*fleet token --role decode"):
        await enrol(world, credential)


@on_both
async def test_of_many_at_once_as_many_join_as_a_token_has_uses(world: World, open_world: Callable[..., World]) -> None:
    worlds = [world, open_world(), open_world()]
    credential = await world.credential(uses=3)
    ended = await asyncio.gather(*(enrol(worlds[n % 3], credential) for n in range(9)), return_exceptions=True)
    joined = [each for each in ended if isinstance(each, str)]
    refused = [each for each in ended if isinstance(each, Unauthenticated)]
    assert (len(set(joined)), len(refused)) == (3, 6)
    assert "was used 3 times" in refused[0].message


@on_both
async def test_a_call_that_is_repeated_gets_the_same_identity_and_uses_the_token_once(world: World) -> None:
    credential, request = await world.credential(), request_of(new_key())
    first = await world.authority.enrol(credential, "decode", request, "")
    again = await world.authority.enrol(credential, "decode", request, "")
    assert again.identity == first.identity and again.certificate != first.certificate
    assert len(await world.authority.members()) == 1


async def test_a_token_expires(world: World) -> None:
    credential = await world.credential(seconds=3600)
    world.pass_hours(1.5)
    with pytest.raises(Unauthenticated, match="expired 30 minutes ago"):
        await enrol(world, credential)


async def test_a_token_is_for_one_role(world: World) -> None:
    credential = await world.credential("decode")
    for role in ("kv", "gateway", "", "decode "):
        with pytest.raises(Unauthenticated, match="is for role decode"):
            await enrol(world, credential, role)
    await enrol(world, credential)


@on_both
async def test_a_secret_that_is_wrong_is_refused_and_closes_the_token_after_ten(world: World) -> None:
    credential = await world.credential()
    token_id, _, _ = credential.partition(".")
    for wrong in ("", "x", "." * 40, f"{'0' * 16}.{encoded(bytes(32))}", f"{token_id}.{'A' * 50}"):
        with pytest.raises(Unauthenticated, match="not known to this fleet"):
            await enrol(world, wrong)
    for _ in range(MAX_FAILURES - 1):  # the last of the wrong ones above had this id too
        with pytest.raises(Unauthenticated, match="not known to this fleet"):
            await enrol(world, f"{token_id}.{encoded(bytes(32))}")
    with pytest.raises(Unauthenticated, match="10 wrong secrets were sent with its id, the limit is 10"):
        await enrol(world, credential)


async def test_the_database_holds_no_secret(world: World) -> None:
    token = await world.authority.new_token("decode", 60, 1, ADDRESSES)
    async with world.database.each() as connection:
        (row,) = (await connection.execute(sa.select(table))).mappings().all()
    assert token.secret not in row.values() and row["id"] == token.id
    assert encoded(token.secret) not in repr(token) and repr(token.secret) not in repr(token)


async def test_a_token_names_every_authority_that_is_trusted(world: World) -> None:
    await world.authority.add_authority()
    token = await world.authority.new_token("kv", 60, 1, ADDRESSES)
    trust = await world.authority.trust()
    assert token.authorities == tuple(authority_digest(each.certificate) for each in trust.trusted)
    assert len(token.authorities) == 2 and JoinToken.parse(token.text) == token


@pytest.mark.parametrize(
    ("role", "seconds", "uses", "reason"),
    [
        ("gateway", 60, 1, "joins without a token"),
        ("king", 60, 1, "must be one of prefill, decode, kv, encode, supervisor"),
        ("decode", 0, 1, "must be 1 s to 30 days"),
        ("decode", 31 * 86_400, 1, "must be 1 s to 30 days"),
        ("decode", 60, 0, "must be 1 to 10,000"),
        ("decode", 60, 10_001, "must be 1 to 10,000"),
    ],
)
def test_a_token_that_means_too_much_is_refused(role: str, seconds: float, uses: int, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        join_tokens.check(role, seconds, uses)
