"""No server of a real fleet answers a stranger, whatever is called; and who is revoked is cut off within 2 s.

The table has one row for each method of the protos, at the process that serves it, and one for data connections. It has
one column for each kind of caller. A `-` is a call that the row of `access.py` allows.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import psutil
import pytest
import pytest_asyncio

from control_plane.secrets import handle_signer, load_secret
from control_plane.storage.database import Database
from kv_transfer_svc.transport import frames
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from tandem.v1.worker_pb2_grpc import WorkerServiceStub
from tandem_runtime.certificates.access import RULES
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import ROLES, Identity, Role
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import PeerUnauthenticated, PermissionDenied, TandemError, Unauthenticated, Unavailable
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.signatures import HandleSigner
from tests.kv_transfer_svc.layout import BLOCK_TOKENS, a_layout
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.strangers import Caller, Callers
from tests.tandem_engine.encoder.checkpoints import make
from tests.tandem_runtime.certificates.services import Method, methods, truthful

pytestmark = pytest.mark.asyncio(loop_scope="module")

CUT_SECONDS = 2.0
_CONTROL, _WORKER, _ENCODE, _KV, _HEALTH = (
    f"/{name}/"
    for name in (
        "tandem.v1.ControlPlaneService",
        "tandem.v1.WorkerService",
        "tandem.v1.EncodeService",
        "tandem.v1.KvTransferService",
        "grpc.health.v1.Health",
    )
)
_ENROLMENT = "/tandem.v1.EnrolmentService/"


@dataclass(frozen=True)
class Server:
    """One process of the fleet, and what it serves."""

    name: str
    address: str
    identity: Identity
    methods: tuple[Method, ...]


@dataclass
class World:
    fleet: Fleet
    callers: Callers
    folder: Path

    def servers(self) -> list[Server]:
        """Return one process of each kind."""
        gateway = Server(
            "gateway", self.fleet.gateway.grpc_address, self.fleet.identity.identity, _of(_CONTROL, _HEALTH)
        )
        return [
            gateway,
            self.server("prefill-0", _WORKER),
            self.server("decode-0", _WORKER),
            self.server("encode-0", _ENCODE),
            self.server("kv-0", _KV),
        ]

    def server(self, name: str, service: str = _KV) -> Server:
        worker = self.fleet.worker(name)
        assert worker is not None, f"{name} is not registered"
        role: Any = self.fleet.services[name].role
        identity = Identity(self.fleet.identity.identity.fleet, role, worker.worker_id)
        return Server(name, worker.info.address, identity, _of(service, _HEALTH))

    def data_address(self) -> tuple[str, int]:
        """Return where the KV service takes data connections: the port that is not its gRPC or its metrics port."""
        process = psutil.Process(self.fleet.services["kv-0"].process.pid)
        listening = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        worker = self.fleet.worker("kv-0")
        assert worker is not None, "it is registered"
        [port] = listening - {_port(worker.info.address), _port(worker.info.metrics_address)}
        return "127.0.0.1", port

    def kv_handle(self, signer: HandleSigner) -> pb.KvHandle:
        """Return a handle of a prompt that nobody computes, held by the KV service."""
        worker = self.fleet.worker("kv-0")
        assert worker is not None, "it is registered"
        handle = pb.KvHandle(
            handle_id=secrets.token_bytes(16),
            request_id="request-1",
            attempt=1,
            prefill_incarnation="somebody",
            holder_address=worker.info.address,
            holder_incarnation=worker.incarnation,
            layout_digest=layout_digest(a_layout()),
            num_tokens=4 * BLOCK_TOKENS,
            num_readers=1,
            deadline_unix_ms=int((time.time() + 60) * 1000),
        )
        return signer.sign(handle)

    def signer(self) -> HandleSigner:
        """Return the gateways' signer."""
        return handle_signer(load_secret("", self.folder / "state"))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _of(*prefixes: str) -> tuple[Method, ...]:
    return tuple(method for method in methods() if method.path.startswith(prefixes))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder, model = tmp_path_factory.mktemp("strangers"), ("--model", str(checkpoint("llama")), *SMALL)
    async with Fleet(folder, certificates=True) as fleet:
        fleet.start("kv", "kv-0", "--transports", "tcp,grpc")
        fleet.start("prefill", "prefill-0", *model)
        fleet.start("decode", "decode-0", *model)
        make("bert", folder / "encoder")
        fleet.start("encode", "encode-0", "--model", str(folder / "encoder"), "--num-threads", "1")
        await fleet.ready()
        yield World(fleet, Callers(fleet, folder / "callers", folder / "state"), folder)


# ------------------------------------------------------------------------------------------------- the table


async def test_every_method_and_the_data_link_refuse_every_stranger_and_every_wrong_role(world: World) -> None:
    strangers = await world.callers.strangers()
    members = {role: await world.callers.member(role) for role in ROLES}
    await _revoke(world, strangers[-1])
    table: dict[str, dict[str, str]] = {}
    for server in world.servers():
        rows = {method: table.setdefault(f"{server.name} {method.path}", {}) for method in server.methods}
        for stranger in strangers:
            async with stranger.channel(server.address, server.identity) as channel:
                for method, row in rows.items():
                    row[stranger.name] = await _answer(method, channel, method.request())
        for role, member in members.items():
            async with open_channel(server.address, member, server.identity) as channel:
                for method, row in rows.items():
                    row[role] = "-"
                    if role not in RULES[method.path].roles:
                        row[role] = await _answer(method, channel, truthful(method, role, member.identity.id))
    table["kv-0 data connection"] = await _data_row(world, strangers, members)
    print(_shown(table))

    assert {key.split()[1] for key in table if "/" in key} == {
        method.path for method in methods() if not method.path.startswith(_ENROLMENT)
    }
    expected = {
        row: dict.fromkeys((stranger.name for stranger in strangers), "refused")
        | {role: "-" if _may(row, role) else "denied" for role in ROLES}
        for row in table
    }
    assert table == expected


def _may(row: str, role: Role) -> bool:
    rule = RULES.get(row.split()[1])
    return role == "kv" if rule is None else role in rule.roles


async def _answer(method: Method, channel: grpc.aio.Channel, request: Any) -> str:
    try:
        await method.call(channel, request)
    except (Unavailable, PeerUnauthenticated):
        return "refused"
    except PermissionDenied:
        return "denied"
    except TandemError as error:
        return repr(error)
    return "answered"


async def _data_row(world: World, strangers: list[Caller], members: dict[Role, FleetMember]) -> dict[str, str]:
    """Ask for a probe over a data connection; only a KV service gets as far as to have its token looked at."""
    address, name = world.data_address(), world.server("kv-0").identity.dns_name
    row = {}
    for caller in (*strangers, *(Caller(role, member) for role, member in members.items())):
        reply = await asyncio.to_thread(_exchange, address, caller.ssl_context(), name)
        row[caller.name] = "refused" if reply is None else reply.error.message
    assert re.search("is meant for incarnation", row["kv"]), row["kv"]
    return row | {"kv": "-"} | {role: "denied" for role in ROLES if row[role] == "refused"}


def _exchange(address: tuple[str, int], context: ssl.SSLContext | None, name: str) -> kv.DataReply | None:
    """Send a request with an unknown token; return the reply, or None if there was none."""
    with socket.create_connection(address, timeout=10) as plain:
        try:
            with plain if context is None else context.wrap_socket(plain, server_hostname=name) as sock:
                return _request(sock)
        except OSError:  # no handshake, or an end in the middle: TLS tells a client only with its first read
            return None


def _request(sock: socket.socket) -> kv.DataReply | None:
    sock.sendall(frames.packed(kv.DataRequest(incarnation="of nobody", probe=kv.ProbeRequest(num_bytes=1))))
    header = _exactly(sock, frames.HEADER_BYTES)
    return kv.DataReply.FromString(_exactly(sock, frames.message_bytes(header))) if header else None


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        more = sock.recv(num_bytes - len(content))
        if not more:
            return b""
        content += more
    return content


def _shown(table: dict[str, dict[str, str]]) -> str:
    columns = list(next(iter(table.values())))
    width = max(map(len, table))
    lines = [" " * width + " | " + " | ".join(columns)]
    for row, cells in table.items():
        lines.append(f"{row:{width}} | " + " | ".join(f"{cells[each]:{len(each)}}" for each in columns))
    return "\n".join(lines)


async def _revoke(world: World, caller: Caller) -> None:
    """Revoke a gateway, once it was answered; return when every process has heard of it."""
    assert caller.member is not None, "only members are revoked"
    servers = world.servers()
    [check] = [method for method in _of(_HEALTH) if method.path.endswith("/Check")]

    async def answers() -> list[str]:
        found = []
        for server in servers:
            async with caller.channel(server.address, server.identity) as channel:
                found.append(await _answer(check, channel, check.request()))
        return found

    assert set(await answers()) == {"answered"}
    await world.fleet.identity.authority.revoke(caller.member.identity)

    async def is_refused() -> bool:
        return set(await answers()) == {"refused"}

    await until(is_refused, 5)


# ------------------------------------------------------------------------------------------------- one worker


async def test_a_worker_takes_no_other_id_reads_no_other_prompts_and_forges_no_handle(world: World) -> None:
    worker, victim = await world.callers.member("prefill"), world.server("prefill-0", _WORKER)
    gateway, holder = world.servers()[0], world.server("kv-0")
    # 1. It cannot report for another worker, nor take another's place.
    async with open_channel(gateway.address, worker, gateway.identity) as channel:
        for method in _of(_CONTROL):
            if RULES[method.path].claims_id is not None:
                with pytest.raises(PermissionDenied, match="may name itself only"):
                    await method.call(channel, truthful(method, "prefill", victim.identity.id))
    # 2. It cannot attach to another worker, nor ask what that one holds.
    async with open_channel(victim.address, worker, victim.identity) as channel:
        for method in _of(_WORKER):
            with pytest.raises(PermissionDenied, match="may be called by gateway"):
                await method.call(channel, method.request())
    # 3. It cannot answer in another's place: whoever dials the other one expects that one's certificate.
    other = await world.callers.member("gateway")
    async with open_channel(victim.address, other, worker.identity) as channel:
        stub: Any = WorkerServiceStub(channel)
        with pytest.raises(Unavailable):
            await stub.Stats(pb.StatsRequest())
    # 4. It cannot sign a handle, change one, or use one that it has seen for another place.
    real = world.kv_handle(world.signer())
    changed, forged = pb.KvHandle(), world.kv_handle(HandleSigner(secrets.token_bytes(32)))
    changed.CopyFrom(real)
    changed.num_readers = 9
    posing = pb.KvHandle()
    posing.CopyFrom(forged)
    posing.signature = real.signature[:9] + forged.signature[9:]
    async with open_channel(holder.address, worker, holder.identity) as channel:
        stub = KvTransferServiceStub(channel)
        for handle in (forged, changed, posing):
            with pytest.raises(Unauthenticated):
                await stub.Reserve(kv.ReserveRequest(handle=handle, layout=a_layout()))
            with pytest.raises(Unauthenticated):
                await stub.Release(kv.ReleaseRequest(handle=handle, reader_id="r"))


# ------------------------------------------------------------------------------------------------- revoked


async def test_a_revoked_process_loses_attach_watch_and_data_link_within_two_seconds(world: World) -> None:
    gateway, decode, other_kv = [await world.callers.member(role) for role in ("gateway", "decode", "kv")]
    worker, holder = world.server("decode-0", _WORKER), world.server("kv-0")
    context = other_kv.certificate.ssl_context(False)
    link = await asyncio.to_thread(_open_link, world.data_address(), context, holder.identity.dns_name)
    with link:
        async with (
            open_channel(worker.address, gateway, worker.identity) as to_worker,
            open_channel(holder.address, decode, holder.identity) as to_holder,
        ):
            worker_stub: Any = WorkerServiceStub(to_worker)
            attach = worker_stub.Attach()
            await attach.write(pb.Command(hello=pb.AttachHello(gateway_id="another", gateway_incarnation="1")))
            assert (await attach.read()).WhichOneof("kind") == "hello"
            stub: Any = KvTransferServiceStub(to_holder)
            request = kv.WatchRequest(
                handle=world.kv_handle(world.signer()), reader_id="r", reader_incarnation="1", layout=a_layout()
            )
            watch = stub.Watch(request)
            await until(partial(_holds_a_handle, world.fleet), 10)
            ends = [
                asyncio.ensure_future(_end_of_stream(attach)),
                asyncio.ensure_future(_end_of_stream(watch)),
                asyncio.ensure_future(asyncio.to_thread(_end_of_link, link)),
            ]
            begun, authority = time.monotonic(), world.fleet.identity.authority
            for member in (gateway, decode, other_kv):
                await authority.revoke(member.identity)
            seconds = [await end - begun for end in ends]
    print("Attach, Watch and data link closed after", ", ".join(f"{each:.2f} s" for each in seconds))
    assert max(seconds) <= CUT_SECONDS


async def _holds_a_handle(fleet: Fleet) -> bool:
    return (await fleet.stats("kv-0")).kv_service.num_handles > 0


def _open_link(address: tuple[str, int], context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """Return a data connection on which a request was answered: it may be idle for two minutes."""
    sock = context.wrap_socket(socket.create_connection(address, timeout=10), server_hostname=name)
    reply = _request(sock)
    assert reply is not None and reply.error.message, "a KV service gets an answer"
    return sock


def _end_of_link(sock: ssl.SSLSocket) -> float:
    try:
        assert sock.recv(1) == b"", "nothing was asked for"
    except TimeoutError:
        raise
    except OSError:  # closed without TLS's goodbye
        return time.monotonic()
    return time.monotonic()


async def _end_of_stream(call: Any) -> float:
    """Return when a stream was cut, in time.monotonic()."""
    with pytest.raises(PeerUnauthenticated, match="is revoked"):
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            continue
    return time.monotonic()


async def test_without_the_database_who_was_revoked_stays_out_and_all_others_go_on(world: World) -> None:
    member, revoked = [await world.callers.member("gateway") for _ in range(2)]
    gateway, holder = world.servers()[0], world.server("kv-0")
    [check] = [method for method in _of(_HEALTH) if method.path.endswith("/Check")]

    async def answers(caller: FleetMember) -> set[str]:
        found = set()
        for server in (gateway, holder):
            async with open_channel(server.address, caller, server.identity) as channel:
                found.add(await _answer(check, channel, check.request()))
        return found

    async def is_out() -> bool:
        return await answers(revoked) == {"refused"}

    assert await answers(revoked) == {"answered"}
    await world.fleet.identity.authority.revoke(revoked.identity)
    begun = time.monotonic()
    await until(is_out, CUT_SECONDS)
    print(f"refused everywhere after {time.monotonic() - begun:.2f} s")
    away = Unavailable("the database could not be reached; try again")
    with patch.object(Database, "check", side_effect=away) as asked:
        # Replies to two heartbeats, and a look at the list that fails: they take nothing away.
        for _ in range(2):
            worker = world.fleet.worker("kv-0")
            assert worker is not None, "it is registered"
            await until(partial(_has_beaten, world.fleet, worker.last_heartbeat), 10)
        await until(lambda: bool(asked.call_count), 5)
        assert await is_out()
        assert await answers(member) == {"answered"}


def _has_beaten(fleet: Fleet, since: float) -> bool:
    worker = fleet.worker("kv-0")
    return worker is not None and worker.last_heartbeat > since
