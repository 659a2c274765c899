"""Every start joins the fleet by itself: a gateway makes it, and the processes of its machine need no setting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from control_plane.fleet_identity.addresses import advertised, is_this_machine_only, known_addresses, local_address
from control_plane.fleet_identity.service import FleetIdentity
from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from control_plane.start import open_fleet, serve
from kv_transfer_svc.settings import KvSettings
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity
from tandem_runtime.channel import open_channel
from tandem_runtime.enrolment.membership import EXIT_REFUSED, StoppedEarly, member_of_fleet
from tandem_runtime.errors import InvalidRequest, PeerUnauthenticated, PermissionDenied, Unavailable
from tandem_runtime.registration import Registrar


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path / "run"))


def settings_of(folder: Path, **more: Any) -> ControlPlaneSettings:
    addresses = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    return ControlPlaneSettings(**{**addresses, "state_dir": str(folder / "state"), **more})


async def member(folder: Path, name: str = "decode-0", **more: Any) -> FleetMember:
    settings = replace(KvSettings(), worker_id=name, state_dir=str(folder / "state"), **more)
    found = await member_of_fleet(settings, "decode", seconds=30)
    assert found is not None
    return found


async def _kv_member(settings: KvSettings, drain: asyncio.Event) -> FleetMember:
    found = await member_of_fleet(settings, "kv", drain, seconds=30)
    assert found is not None
    return found


@dataclass
class Running:
    """A gateway as `python -m control_plane` runs it."""

    fleet: FleetIdentity
    gateway: Gateway
    drain: asyncio.Event
    task: asyncio.Task[int]

    @classmethod
    async def start(cls, fleet: FleetIdentity, settings: ControlPlaneSettings) -> Running:
        gateway, drain = Gateway(settings, fleet), asyncio.Event()
        task = asyncio.create_task(gateway.run(drain))
        started = asyncio.create_task(gateway.started.wait())
        await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
        assert started.done(), task
        return cls(fleet, gateway, drain, task)

    async def stop(self) -> None:
        self.drain.set()
        assert await asyncio.wait_for(self.task, 30) == 0


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` returns, or awaits to, something true."""
    async with asyncio.timeout(30):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


def beat_of(who: FleetMember) -> cp.HeartbeatRequest:
    return cp.HeartbeatRequest(worker_id=who.identity.id, incarnation="one", deny_list_number=who.denied.number)


async def test_a_process_of_the_machine_needs_no_setting_and_reaches_the_gateway(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    waiting = asyncio.create_task(member(tmp_path))  # in any order
    async with open_fleet(settings) as fleet:
        running = await Running.start(fleet, settings)
        worker = await waiting
        assert worker.identity.fleet == fleet.identity.fleet and worker.identity.role == "decode"
        async with open_channel(running.gateway.grpc_address, worker, "gateway") as channel:
            stub = cp_grpc.ControlPlaneServiceStub(channel)
            info = pb.WorkerInfo(
                worker_id=worker.identity.id,
                incarnation="one",
                role=pb.WORKER_ROLE_DECODE,
                address="127.0.0.1:1",
                host_id="here",
            )
            reply = await stub.Register(cp.RegisterRequest(info=info), timeout=10)
            assert reply.bundle_number == fleet.bundle_number > 0
            assert (reply.deny_list.number, list(reply.deny_list.ids)) == (0, [])

            # Another member is revoked: the next heartbeat says so, and says it once.
            other = await member(tmp_path, "decode-1")
            assert other.identity.id != worker.identity.id
            await fleet.authority.revoke(other.identity)
            await fleet.deny_list.refresh()
            worker.heard(await stub.Heartbeat(beat_of(worker), timeout=10))
            assert other.identity in worker.denied and worker.denied.number == 1
            again = await stub.Heartbeat(beat_of(worker), timeout=10)
            assert (again.HasField("deny_list"), list(again.deny_list.ids)) == (True, [])

            # Each heartbeat of a stream is of its sender.
            stream: Any = stub.Heartbeats()
            await stream.write(beat_of(worker))
            assert (await stream.read()).known
            await stream.write(beat_of(other))
            with pytest.raises(PermissionDenied, match="may name itself only"):
                await stream.read()

        # The gateway itself refuses it.
        assert running.gateway.member is not None and other.identity in running.gateway.member.denied
        async with open_channel(running.gateway.grpc_address, other, "gateway") as channel:
            with pytest.raises(PeerUnauthenticated, match="is revoked"):
                await cp_grpc.ControlPlaneServiceStub(channel).Heartbeat(beat_of(other), timeout=10)
        # Nobody without a certificate gets in.
        async with open_channel(running.gateway.grpc_address) as channel:
            with pytest.raises(Unavailable):
                await cp_grpc.ControlPlaneServiceStub(channel).ListWorkers(cp.ListWorkersRequest(), timeout=10)
        await running.stop()
        await worker.close()
        await other.close()


async def test_a_restart_keeps_its_identity_and_two_processes_of_one_name_have_two(tmp_path: Path) -> None:
    async with open_fleet(settings_of(tmp_path)) as fleet:
        first = await member(tmp_path)
        second = await member(tmp_path)
        assert first.identity.id != second.identity.id
        await first.close()
        again = await member(tmp_path)
        assert again.identity == first.identity
        await again.close()
        # The tokens of the gateway are gone, as on another machine: the certificate is enough.
        (tmp_path / "state" / "join" / "decode").unlink()
        alone = await member(tmp_path)
        assert alone.identity == first.identity
        for each in (alone, second):
            await each.close()
        assert {each.identity.role for each in await fleet.authority.members()} == {"gateway", "decode"}


async def test_a_gateway_that_starts_again_is_the_same_member(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    async with open_fleet(settings) as fleet:
        first, serial = fleet.identity, fleet.certificate.peers.certificate.serial_number
        async with open_fleet(settings) as beside:  # two at a time are two members, however often they start
            second = beside.identity
    for _ in range(3):
        async with open_fleet(settings) as fleet, open_fleet(settings) as beside:
            assert (fleet.identity, beside.identity) == (first, second)
            assert fleet.certificate.peers.certificate.serial_number != serial
            assert {each.identity for each in await fleet.authority.members()} == {first, second}


async def test_a_gateway_whose_identity_cannot_be_used_again_is_a_new_member(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    async with open_fleet(settings) as fleet:
        revoked = fleet.identity
        await fleet.authority.revoke(revoked)
    async with open_fleet(settings) as fleet:
        second = fleet.identity
        assert second.fleet == revoked.fleet and second.id != revoked.id
    database = f"sqlite:///{tmp_path / 'other.db'}"
    async with open_fleet(settings_of(tmp_path, database_url=database)) as other:
        assert other.identity.fleet != second.fleet
        foreign = other.identity
    (tmp_path / "state" / "certificates" / "gateway" / "current").resolve().joinpath("certificate.pem").write_text("?")
    async with open_fleet(settings) as fleet:
        assert fleet.identity.id not in (revoked.id, second.id, foreign.id)


async def test_a_certificate_of_another_fleet_is_replaced(tmp_path: Path) -> None:
    async with open_fleet(settings_of(tmp_path)):
        first = await member(tmp_path)
        await first.close()
    database = f"sqlite:///{tmp_path / 'other.db'}"
    async with open_fleet(settings_of(tmp_path, database_url=database)) as other:
        second = await member(tmp_path)
        assert second.identity.fleet == other.identity.fleet != first.identity.fleet
        await second.close()


async def test_a_process_that_runs_when_its_fleet_is_replaced_ends_to_join_the_next_one(tmp_path: Path) -> None:
    settings, drain = KvSettings(state_dir=str(tmp_path / "state")), asyncio.Event()
    async with open_fleet(settings_of(tmp_path)):
        worker = await member_of_fleet(settings, "kv", drain, seconds=30)
        assert worker is not None
        worker.start()
        # Another gateway of the same fleet writes new tokens: nothing happens.
        async with open_fleet(settings_of(tmp_path)) as neighbour:
            assert neighbour.identity.fleet == worker.identity.fleet
    assert not drain.is_set()
    database = f"sqlite:///{tmp_path / 'other.db'}"
    async with open_fleet(settings_of(tmp_path, database_url=database)):
        await asyncio.wait_for(drain.wait(), 30)
    await worker.close()


async def test_a_revoked_process_ends_and_says_why(tmp_path: Path) -> None:
    settings, drain = KvSettings(state_dir=str(tmp_path / "state")), asyncio.Event()
    gateway_settings = settings_of(tmp_path)
    async with open_fleet(gateway_settings) as fleet:
        running = await Running.start(fleet, gateway_settings)
        worker = await member_of_fleet(settings, "kv", drain, seconds=30)
        assert worker is not None
        worker.start()
        info = pb.WorkerInfo(
            worker_id=worker.identity.id, incarnation="one", role=pb.WORKER_ROLE_KV, address="127.0.0.1:1", host_id="h"
        )
        registrar = Registrar((running.gateway.grpc_address,), info, pb.LoadReport, member=worker)
        registrar.start()
        await asyncio.wait_for(registrar.wait_registered(), 30)
        assert (drain.is_set(), worker.exit_code) == (False, 0)
        with capture_logs() as lines:
            await fleet.authority.revoke(worker.identity)
            await asyncio.wait_for(drain.wait(), 30)
        assert worker.exit_code == EXIT_REFUSED
        [line] = [line for line in lines if line["event"] == "certificate_refused"]
        assert "is revoked" in line["reason"] and str(tmp_path / "state" / "certificates" / "kv") in line["remedy"]
        await registrar.stop()
        await worker.close()
        await running.stop()


async def test_a_refusal_by_anybody_but_the_fleet_ends_no_process(tmp_path: Path) -> None:
    drain = asyncio.Event()
    async with open_fleet(settings_of(tmp_path)) as fleet:
        worker = await member_of_fleet(KvSettings(state_dir=str(tmp_path / "state")), "kv", drain, seconds=30)
        assert worker is not None
        first = worker.certificate.current.serial
        renewed = asyncio.Event()
        worker.certificate.listen(renewed.set)
        worker.start()
        worker.refused()  # by a gateway with an old list, say: the fleet renews it
        await asyncio.wait_for(renewed.wait(), 30)
        assert worker.certificate.current.serial != first
        assert (drain.is_set(), worker.exit_code) == (False, 0)
        await worker.close()
        assert len(await fleet.authority.members()) == 2, "it is the same member"


async def test_a_process_whose_handshakes_are_refused_asks_for_a_certificate(tmp_path: Path) -> None:
    """Of a gateway whose clock is ahead: it has issued the certificate, and sees that it has expired."""
    settings, gateway_settings = KvSettings(state_dir=str(tmp_path / "state")), settings_of(tmp_path)
    async with open_fleet(gateway_settings) as fleet:
        running = await Running.start(fleet, gateway_settings)
        usual, fleet.authority._validity_seconds = fleet.authority._validity_seconds, 2
        worker = await _kv_member(settings, asyncio.Event())
        fleet.authority._validity_seconds = usual
        renewer: Any = worker._renewer
        renewer._keeper._clock = lambda: time.time() - 3600  # by its own clock the certificate is good for an hour
        await until(lambda: time.time() > worker.certificate.current.expires_at + 1)
        worker.start()
        info = pb.WorkerInfo(
            worker_id=worker.identity.id, incarnation="one", role=pb.WORKER_ROLE_KV, address="127.0.0.1:1", host_id="h"
        )
        registrar = Registrar((running.gateway.grpc_address,), info, pb.LoadReport, member=worker)
        registrar.start()
        await asyncio.wait_for(registrar.wait_registered(), 30)
        await registrar.stop()
        await worker.close()
        await running.stop()


async def test_a_revoked_gateway_ends_to_be_a_new_member(tmp_path: Path) -> None:
    drain = asyncio.Event()
    async with open_fleet(settings_of(tmp_path)) as neighbour:
        serving = asyncio.create_task(serve(settings_of(tmp_path), drain))

        async def identities() -> list[Identity]:
            members = await neighbour.authority.members()
            return [each.identity for each in members if each.identity != neighbour.identity]

        await until(identities)
        [identity] = await identities()
        await neighbour.authority.revoke(identity)
        assert await asyncio.wait_for(serving, 60) == 1
        assert drain.is_set()


async def test_a_process_joins_after_the_authority_was_replaced(tmp_path: Path) -> None:
    async with open_fleet(settings_of(tmp_path)) as fleet:
        before = await member(tmp_path, "decode-0")
        before.start()
        await fleet.authority.add_authority()
        await fleet.certificate.check()
        await fleet.renew_local_tokens()
        before.heard(cp.HeartbeatReply(bundle_number=fleet.bundle_number))
        await until(lambda: len(before.certificate.current.authorities) == 2)
        await fleet.authority.switch_authority(force=True)
        await fleet.authority.remove_old_authority()
        await fleet.certificate.check()
        await fleet.renew_local_tokens()
        after = await member(tmp_path, "decode-1")
        assert len(after.certificate.current.authorities) == 1
        assert after.identity.fleet == before.identity.fleet
        await before.close()
        again = await member(tmp_path, "decode-0")
        assert again.identity == before.identity
        for each in (after, again):
            await each.close()


@pytest.mark.parametrize("runs", [True, False])
async def test_a_process_that_missed_a_whole_rotation_stays_the_member_that_it_was(tmp_path: Path, runs: bool) -> None:
    drain = asyncio.Event()
    settings = KvSettings(state_dir=str(tmp_path / "state"))
    async with open_fleet(settings_of(tmp_path)) as fleet:
        worker = await _kv_member(settings, drain)
        identity, first = worker.identity, worker.certificate.current.authorities
        if not runs:
            await worker.close()
        await fleet.authority.add_authority()
        await fleet.authority.switch_authority(force=True)
        await fleet.authority.remove_old_authority()
        await fleet.certificate.check()
        await fleet.renew_local_tokens()
        if runs:
            worker.start()
            await until(lambda: worker.certificate.current.authorities != first or drain.is_set())
        else:
            worker = await _kv_member(settings, drain)
        assert (worker.identity, worker.exit_code, drain.is_set()) == (identity, 0, False)
        assert len(worker.certificate.current.authorities) == 1 and worker.certificate.current.authorities != first
        await worker.close()


async def test_the_tokens_of_the_machine_are_written_when_it_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state" / "join" / "kv"
    async with open_fleet(settings_of(tmp_path)) as fleet:
        first = file.read_text()
        await fleet.renew_local_tokens()
        assert file.read_text() == first
        later = time.time() + 13 * 3600
        monkeypatch.setattr(time, "time", lambda: later)
        await fleet.renew_local_tokens()
        assert file.read_text() != first


async def test_a_token_of_the_command_line_is_enough_on_another_machine(tmp_path: Path) -> None:
    async with open_fleet(settings_of(tmp_path)) as fleet:
        token = (await fleet.authority.new_token("decode", 60, 1, (fleet.enrolment_address,))).text
        elsewhere = tmp_path / "elsewhere"
        worker = await member(elsewhere, join=token)
        await worker.close()
        again = await member(elsewhere, join=token)  # the token is used up; the certificate is there
        assert again.identity == worker.identity
        await again.close()
        file = tmp_path / "token"
        file.write_text(token)
        by_file = await member(elsewhere, join_file=str(file))
        await by_file.close()
        file.unlink()
        without = await member(elsewhere, join_file=str(file))
        assert by_file.identity == without.identity == worker.identity
        await without.close()
        with pytest.raises(InvalidRequest, match="both set"):
            await member(elsewhere, join=token, join_file="x")


async def test_without_certificates_only_the_flag_helps(tmp_path: Path) -> None:
    settings = KvSettings(state_dir=str(tmp_path / "state"))
    assert await member_of_fleet(replace(settings, insecure_plaintext=True), "kv") is None
    assert not (tmp_path / "state").exists()
    with pytest.raises(InvalidRequest, match=r"no join token in .*--insecure-plaintext"):
        await member_of_fleet(settings, "kv", seconds=0)


async def test_a_process_that_waits_for_its_token_ends_when_it_is_told_to(tmp_path: Path) -> None:
    drain = asyncio.Event()
    waiting = asyncio.create_task(member_of_fleet(KvSettings(state_dir=str(tmp_path)), "kv", drain))
    await asyncio.sleep(0)
    drain.set()
    with pytest.raises(StoppedEarly):
        await asyncio.wait_for(waiting, 30)


async def test_a_gateway_in_plain_text_opens_no_enrolment_port(tmp_path: Path) -> None:
    drain = asyncio.Event()
    drain.set()
    assert await asyncio.wait_for(serve(settings_of(tmp_path, insecure_plaintext=True), drain), 60) == 0
    assert not (tmp_path / "state" / "join").exists()
    assert await asyncio.wait_for(serve(settings_of(tmp_path), drain), 60) == 0
    assert (tmp_path / "state" / "join" / "decode").exists()


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "127.0.0.1:8644"),
        ({"grpc_listen": "0.0.0.0:9000"}, "0.0.0.0:9001"),
        ({"grpc_listen": "[::1]:0"}, "[::1]:0"),
        ({"grpc_listen": "unix:/run/x"}, "127.0.0.1:8644"),
        ({"grpc_listen": "127.0.0.1:65535"}, "127.0.0.1:65534"),
        ({"enrolment_listen": "10.0.0.1:1"}, "10.0.0.1:1"),
    ],
)
def test_the_enrolment_port_is_next_to_the_grpc_port(settings: dict[str, Any], address: str) -> None:
    assert ControlPlaneSettings(**settings).enrolment_address == address


def test_an_address_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="'nonsense' is not an address"):
        _ = ControlPlaneSettings(grpc_listen="nonsense").enrolment_address


def test_a_gateway_names_addresses_that_others_can_reach(tmp_path: Path) -> None:
    assert advertised("10.0.0.1:8644", ()) == ("10.0.0.1:8644",)
    assert advertised("0.0.0.0:8644", ("public:8644",)) == ("public:8644",)
    everywhere = advertised("0.0.0.0:8644", ())
    assert everywhere and all(each.endswith(":8644") and not each.startswith("0.") for each in everywhere)
    assert (local_address("0.0.0.0:1"), local_address("[::]:1"), local_address("10.0.0.1:1")) == (
        "127.0.0.1:1",
        "[::1]:1",
        "10.0.0.1:1",
    )
    assert is_this_machine_only(["127.0.0.1:1", "[::1]:1"]) and not is_this_machine_only(["127.0.0.1:1", "gw:1"])
    assert known_addresses(tmp_path) == []


def test_a_certificate_lives_for_a_sensible_time() -> None:
    for seconds in (0.0, 9.0, 31 * 86_400.0):
        with pytest.raises(ValueError, match="certificate_seconds"):
            ControlPlaneSettings(certificate_seconds=seconds)
