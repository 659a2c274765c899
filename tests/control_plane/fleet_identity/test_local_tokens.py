"""The join tokens of a machine name all gateways that run there, so that any one of them may end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.fleet_identity.addresses import known_addresses
from control_plane.fleet_identity.local_tokens import LocalTokens
from control_plane.start import open_fleet
from tandem_runtime.certificates.names import Role
from tandem_runtime.enrolment.join_token import MAX_ADDRESSES, JoinToken
from tests.control_plane.fleet_identity.test_starts import member, settings_of, until

OURS, THEIRS = (bytes([1] * 32),), (bytes([2] * 32),)
ROLES: tuple[Role, ...] = ("decode", "kv")


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path / "run"))


def tokens(number: int, authorities: tuple[bytes, ...] = OURS) -> dict[Role, JoinToken]:
    return {role: JoinToken(f"{number:016x}", bytes(32), authorities, ("unused:1",)) for role in ROLES}


def gateway(folder: Path, port: int) -> LocalTokens:
    return LocalTokens(folder, f"127.0.0.1:{port}", (f"machine:{port}",))


def in_folder(folder: Path, role: Role = "decode") -> JoinToken:
    return JoinToken.parse((folder / role).read_text())


async def test_a_process_joins_at_the_gateway_that_is_left_of_two_on_its_machine(tmp_path: Path) -> None:
    """The last to start wrote its own port only; when it had ended, nobody could join for up to 12 hours."""
    async with open_fleet(settings_of(tmp_path)) as first:
        async with open_fleet(settings_of(tmp_path)) as second:
            assert second.enrolment_address != first.enrolment_address
            before = await member(tmp_path, "decode-0")
        after = await member(tmp_path, "decode-1")
        assert before.identity.fleet == after.identity.fleet == first.identity.fleet
        await before.close()
        await after.close()


async def test_a_gateway_adds_its_port_where_another_has_left_it_out(tmp_path: Path) -> None:
    """Another one renews its tokens, or is of a release that names itself only."""
    file = tmp_path / "state" / "join" / "decode"
    async with open_fleet(settings_of(tmp_path)) as first, open_fleet(settings_of(tmp_path)) as second:
        written = JoinToken.parse(file.read_text())
        file.write_text(replace(written, addresses=(second.enrolment_address,)).text)
        await first.renew_local_tokens()
        assert JoinToken.parse(file.read_text()) == replace(
            written, addresses=(first.enrolment_address, second.enrolment_address)
        )


async def test_a_gateway_that_is_gone_is_forgotten_when_the_tokens_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state" / "join" / "kv"
    async with open_fleet(settings_of(tmp_path)) as first:
        async with open_fleet(settings_of(tmp_path)) as second:
            gone = second.enrolment_address
        assert set(JoinToken.parse(file.read_text()).addresses) == {first.enrolment_address, gone}
        later = time.time() + 13 * 3600
        monkeypatch.setattr(time, "time", lambda: later)
        await first.renew_local_tokens()
        assert JoinToken.parse(file.read_text()).addresses == (first.enrolment_address,)


async def test_a_running_gateway_looks_after_the_tokens_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.fleet_identity.service._LOCAL_TOKEN_CHECK_SECONDS", 0.01)
    file = tmp_path / "state" / "join" / "decode"
    async with open_fleet(settings_of(tmp_path)) as fleet:
        written = file.read_text()
        task = asyncio.ensure_future(fleet.loops["local-join-tokens"]())
        file.write_text(replace(JoinToken.parse(written), addresses=("127.0.0.1:1",)).text)
        await until(lambda: fleet.enrolment_address in file.read_text())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_tokens_name_all_gateways_of_the_fleet_in_any_order_of_their_writing(tmp_path: Path) -> None:
    first, second, third = (gateway(tmp_path, port) for port in (1, 2, 3))
    first.write(tokens(1))
    second.write(tokens(2))
    third.write(tokens(3))
    assert in_folder(tmp_path).addresses == ("127.0.0.1:3", "127.0.0.1:2", "127.0.0.1:1")
    assert known_addresses(tmp_path) == ["machine:3", "machine:2", "machine:1"]
    second.write(tokens(4))  # it renews them
    for each in (first, third, first, second):
        each.add_ours()
    assert in_folder(tmp_path, "kv").id == f"{4:016x}"
    assert set(in_folder(tmp_path).addresses) == {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}
    assert set(known_addresses(tmp_path)) == {"machine:1", "machine:2", "machine:3"}
    assert [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o777 != 0o600] == []


def test_the_tokens_of_another_fleet_are_left_alone_or_replaced_whole(tmp_path: Path) -> None:
    ours, theirs = gateway(tmp_path, 1), gateway(tmp_path, 2)
    ours.write(tokens(1))
    theirs.write(tokens(2, THEIRS))
    assert (in_folder(tmp_path).addresses, known_addresses(tmp_path)) == (("127.0.0.1:2",), ["machine:2"])
    ours.add_ours()
    assert (in_folder(tmp_path).addresses, known_addresses(tmp_path)) == (("127.0.0.1:2",), ["machine:2"])


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff"])
def test_a_file_that_is_no_token_is_replaced_when_a_gateway_starts_and_hinders_none(
    tmp_path: Path, content: bytes
) -> None:
    for name in (*ROLES, "addresses"):
        (tmp_path / name).write_bytes(content)
    ours = gateway(tmp_path, 1)
    ours.write(tokens(1))
    assert (in_folder(tmp_path).addresses, known_addresses(tmp_path)) == (("127.0.0.1:1",), ["machine:1"])
    for name in ("decode", "addresses"):
        (tmp_path / name).write_bytes(content)
    ours.add_ours()
    assert (tmp_path / "decode").read_bytes() == content
    assert known_addresses(tmp_path)[0] == "machine:1"


def test_a_token_names_no_more_addresses_than_may_be_and_ones_own_first(tmp_path: Path) -> None:
    for port in range(1, MAX_ADDRESSES + 3):
        gateway(tmp_path, port).write(tokens(port))
    last = MAX_ADDRESSES + 2
    assert in_folder(tmp_path).addresses == tuple(f"127.0.0.1:{port}" for port in range(last, last - MAX_ADDRESSES, -1))
