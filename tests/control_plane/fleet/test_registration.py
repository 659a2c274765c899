"""What a process registers is data of a stranger: bounded, of its own host, and it gets only the keys of its role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.fleet import registry as registry_module
from control_plane.fleet.registration import SELDOM_MS, ControlPlaneService, take_relayed
from control_plane.fleet.registration_bounds import MAX_REPORT_BYTES, check_info, check_load
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.status import FleetStatus
from control_plane.fleet.worker_addresses import WorkerAddresses, parse_networks, peer_ip
from control_plane.secrets import kv_keys
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InvalidRequest, Overloaded, StaleIncarnation, Unavailable
from tandem_runtime.server import GrpcServer

KEYS = kv_keys(b"s" * 32)
ROLES = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_KV)


def an_info(**changes: object) -> pb.WorkerInfo:
    fields = {
        "worker_id": "decode-1",
        "incarnation": "life-1",
        "role": pb.WORKER_ROLE_DECODE,
        "address": "127.0.0.1:8701",
        "host_id": "host-a",
        "version": "0.3.0",
        "settings": {"model": "a model"},
    }
    return pb.WorkerInfo(**(fields | changes))  # type: ignore[arg-type]


def a_card() -> pb.ModelCard:
    return pb.ModelCard(model_id="m", context_length=512, block_size=16, vocab_size=300, eos_token_ids=[2])


@asynccontextmanager
async def control_plane(macs_until: float = 0.0) -> AsyncIterator[cp_grpc.ControlPlaneServiceAsyncStub]:
    service = ControlPlaneService(WorkerRegistry(3.0, 5.0), KEYS, [], macs_until=macs_until)
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: cp_grpc.add_ControlPlaneServiceServicer_to_server(service, grpc), []
    )
    address = await server.start()
    async with open_channel(address) as channel:
        yield cp_grpc.ControlPlaneServiceStub(channel)
    await server.stop(0)


# ------------------------------------------------------------------------------------------------------- heartbeats


def a_beat(incarnation: str = "life-1", num_running: int = 0) -> cp.HeartbeatRequest:
    load = pb.LoadReport(state=pb.WORKER_STATE_READY, num_running=num_running)
    return cp.HeartbeatRequest(worker_id="decode-1", incarnation=incarnation, load=load)


async def test_each_heartbeat_of_a_stream_is_taken_in_and_answered() -> None:
    async with control_plane() as stub:
        stream: Any = stub.Heartbeats()
        await stream.write(a_beat())
        assert not (await stream.read()).known
        await stub.Register(cp.RegisterRequest(info=an_info()))
        for num_running in (1, 7):
            await stream.write(a_beat(num_running=num_running))
            assert (await stream.read()).known
            [status] = (await stub.ListWorkers(cp.ListWorkersRequest())).workers
            assert status.load.num_running == num_running
        await stream.write(a_beat("life-0"))
        with pytest.raises(StaleIncarnation, match="is incarnation life-1 now"):
            await stream.read()


class News:
    """What members hear, of a fleet that changes."""

    def __init__(self) -> None:
        self.bundle_number = 2
        self.denied: list[str] = []

    def denied_since(self, number: int) -> cp.DenyList:
        return cp.DenyList(number=len(self.denied), ids=self.denied[number:])


async def test_a_worker_whose_host_passes_its_heartbeats_on_is_asked_when_they_stop_or_there_is_news() -> None:
    now, news = 100.0, News()
    registry = WorkerRegistry(3.0, 5.0, lambda: now)
    service = ControlPlaneService(registry, KEYS, [], news=news)
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: cp_grpc.add_ControlPlaneServiceServicer_to_server(service, grpc), []
    )
    registry.register(an_info(), pb.LoadReport(state=pb.WORKER_STATE_READY))
    async with open_channel(await server.start()) as channel, asyncio.timeout(30):
        stream: Any = cp_grpc.ControlPlaneServiceStub(channel).Heartbeats()

        async def beaten() -> cp.HeartbeatReply:
            await stream.write(a_beat())
            reply: cp.HeartbeatReply = await stream.read()
            return reply

        assert (await beaten()).next_ms == 0
        take_relayed(registry, a_beat(), "host-a")
        assert (await beaten()).next_ms == SELDOM_MS
        service.ask()  # nothing to ask for: the next message is the reply to the next heartbeat
        assert (await beaten()).next_ms == SELDOM_MS
        # 1. The host has been silent for two seconds: one question, however often the sweep comes.
        now = 102.0
        service.ask()
        service.ask()
        assert (await stream.read()).next_ms == 0
        assert (await beaten()).next_ms == 0, "until the host is heard again"
        # 2. There is news.
        take_relayed(registry, a_beat(), "host-a")
        assert (await beaten()).next_ms == SELDOM_MS
        news.denied.append("a" * 32)
        service.ask()
        question = await stream.read()
        assert (question.next_ms, list(question.deny_list.ids)) == (0, ["a" * 32])
        assert (await beaten()).next_ms == SELDOM_MS
        news.bundle_number = 3
        service.ask()
        assert (await stream.read()).bundle_number == 3
        # 3. The KV service of the host is another one.
        assert (await beaten()).next_ms == SELDOM_MS
        kv = an_info(worker_id="kv-1", incarnation="kv-life", role=pb.WORKER_ROLE_KV)
        registry.register(kv, pb.LoadReport(state=pb.WORKER_STATE_READY))
        service.ask()
        assert [each.incarnation for each in (await stream.read()).kv_services] == ["kv-life"]
        service.close()
    await server.stop(0)


async def test_of_many_workers_some_are_asked_in_each_turn() -> None:
    now = 100.0
    registry = WorkerRegistry(3.0, 5.0, lambda: now)
    service = ControlPlaneService(registry, KEYS, [])
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: cp_grpc.add_ControlPlaneServiceServicer_to_server(service, grpc), []
    )
    names = [f"decode-{number}" for number in range(40)]
    async with open_channel(await server.start()) as channel, asyncio.timeout(60):
        stub = cp_grpc.ControlPlaneServiceStub(channel)
        streams: list[Any] = []
        for name in names:
            registry.register(an_info(worker_id=name, incarnation=name), pb.LoadReport())
            beat = cp.HeartbeatRequest(worker_id=name, incarnation=name)
            take_relayed(registry, beat, "host-a")
            streams.append(stub.Heartbeats())
            await streams[-1].write(beat)
            assert (await streams[-1].read()).next_ms == SELDOM_MS
        now = 102.0
        assert [service.ask() for _ in range(4)] == [True, True, False, False]
        for stream in streams:
            assert (await stream.read()).known
        service.close()
    await server.stop(0)


async def test_a_control_plane_that_stops_ends_its_streams_at_once() -> None:
    service = ControlPlaneService(WorkerRegistry(3.0, 5.0), KEYS, [])
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: cp_grpc.add_ControlPlaneServiceServicer_to_server(service, grpc), []
    )
    async with open_channel(await server.start()) as channel:
        stream: Any = cp_grpc.ControlPlaneServiceStub(channel).Heartbeats()
        await stream.write(a_beat())
        assert not (await stream.read()).known
        service.close()
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match="stops"):
                await stream.read()
            await server.stop(3600)  # nothing is left to wait for


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("role", ROLES)
async def test_no_reply_has_a_key_that_signs_handles(role: pb.WorkerRole.ValueType) -> None:
    async with control_plane() as stub:
        reply = await stub.Register(cp.RegisterRequest(info=an_info(role=role)))
        assert tuple(reply.handle_public_keys) == KEYS.public_keys and reply.handle_key == b""
        assert reply.link_key == (KEYS.link_key if role == pb.WORKER_ROLE_KV else b"")


@pytest.mark.parametrize("role", ROLES)
async def test_until_the_set_time_kv_services_alone_get_the_key_of_release_0_2(role: pb.WorkerRole.ValueType) -> None:
    async with control_plane(macs_until=time.time() + 60) as stub:
        reply = await stub.Register(cp.RegisterRequest(info=an_info(role=role)))
        assert reply.handle_key == (KEYS.mac_key if role == pb.WORKER_ROLE_KV else b"")


# ---------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("address", "kept"),
    [("127.0.0.1:9100", "127.0.0.1:9100"), ("", ""), ("192.0.2.7:9100", ""), ("127.0.0.1:0", ""), ("nonsense", "")],
)
async def test_prometheus_is_sent_to_addresses_of_the_workers_own_host_only(address: str, kept: str) -> None:
    """A worker with another address is registered all the same."""
    registry = WorkerRegistry(3.0, 5.0)
    service = ControlPlaneService(registry, KEYS, [])

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:4000"

    info = an_info(metrics_address=address, metrics_tls=True)
    await service.Register(cp.RegisterRequest(info=info), Context())
    [worker] = registry.workers()
    assert worker.info.metrics_address == kept
    labels = {"__scheme__": "https", "role": "decode", "worker": "decode-1", "host_id": "host-a"}
    assert FleetStatus(registry).metrics_targets() == ([{"targets": [kept], "labels": labels}] if kept else [])


# ------------------------------------------------------------------------------------------------------------ bounds

TOO_MUCH: list[tuple[str, Callable[[pb.WorkerInfo], None]]] = [
    ("info.worker_id", lambda info: setattr(info, "worker_id", "")),
    ("info.worker_id", lambda info: setattr(info, "worker_id", "x" * 1025)),
    ("info.worker_id", lambda info: setattr(info, "worker_id", "\x1b[2Jdecode")),
    ("info.host_id", lambda info: setattr(info, "host_id", "a\nb")),
    ("info.role", lambda info: setattr(info, "role", 9)),
    ("info.version", lambda info: setattr(info, "version", "v" * 2000)),
    ("info.settings", lambda info: info.settings.update({str(number): "" for number in range(1025)})),
    ("info.settings", lambda info: info.settings.update({"model": "x" * 16_385})),
    ("info.card.model_id", lambda info: setattr(info.card, "model_id", "m" * 1025)),
    ("info.card.aliases", lambda info: info.card.aliases.extend(["a"] * 257)),
    ("info.card.chat_template", lambda info: setattr(info.card, "chat_template", "x" * 262_145)),
    ("info.card.eos_token_ids", lambda info: info.card.eos_token_ids.extend([1] * 1025)),
    ("info.card.assets.digest", lambda info: info.card.assets.extend([pb.Asset(digest=b"d" * 1025)])),
    ("info.card.layout.groups", lambda info: info.card.layout.groups.extend([pb.KvGroup()] * 257)),
    ("info.card.layout.groups.layers", lambda info: info.card.layout.groups.extend([pb.KvGroup(layers=[1] * 4097)])),
    ("info.card.generation_defaults.top_p", lambda info: _set_top_p(info, float("nan"))),
    ("info.card.generation_defaults.top_p", lambda info: _set_top_p(info, -1.0)),
    ("info.card.vocab_size", lambda info: setattr(info.card, "vocab_size", 0)),
    ("info.card.context_length", lambda info: setattr(info.card, "context_length", 0)),
]


def _set_top_p(info: pb.WorkerInfo, value: float) -> None:
    info.card.generation_defaults.top_p = value


@pytest.mark.parametrize(("field", "change"), TOO_MUCH, ids=[f"{n}-{field}" for n, (field, _) in enumerate(TOO_MUCH)])
async def test_every_string_list_and_number_of_a_registration_has_a_bound(
    field: str, change: Callable[[pb.WorkerInfo], None]
) -> None:
    info = an_info(card=a_card())
    check_info(info)
    change(info)
    async with control_plane() as stub:
        with pytest.raises(InvalidRequest) as refused:
            await stub.Register(cp.RegisterRequest(info=info))
        assert (refused.value.field, len(refused.value.message) < 300) == (field, True)
        assert not (await stub.ListWorkers(cp.ListWorkersRequest())).workers


async def test_reports_are_bounded_too() -> None:
    nan = pb.LoadReport(counters={"steps": float("nan")})
    absurd = pb.LoadReport(counters={"prompt_tokens_computed": 1e300})
    endless = pb.LoadReport(kv_service=pb.KvServiceLoad(links=[pb.KvLink(bytes_per_second=float("inf"))]))
    many = pb.LoadReport(counters={f"counter {number:<20}": 1.0 for number in range(4097)})
    large = pb.LoadReport(error="x" * (MAX_REPORT_BYTES + 1))
    for load, field in (
        (nan, "counters"),
        (absurd, "counters"),
        (endless, "links"),
        (many, "counters"),
        (large, "load"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            check_load(load)
    async with control_plane() as stub:
        await stub.Register(cp.RegisterRequest(info=an_info()))
        for load, address in ((nan, ""), (pb.LoadReport(), "x" * 2000)):
            beat = cp.HeartbeatRequest(worker_id="decode-1", incarnation="life-1", load=load, kv_address=address)
            with pytest.raises(InvalidRequest):
                await stub.Heartbeat(beat)
        beat = cp.HeartbeatRequest(worker_id="decode-1", incarnation="life-1")
        assert (await stub.Heartbeat(beat)).known


def test_a_kv_service_of_a_large_fleet_may_report_all_its_links() -> None:
    link = pb.KvLink(address="kv-service-of-some-host.example:50051", transport="tcp", bytes_per_second=1e9)
    check_load(pb.LoadReport(kv_service=pb.KvServiceLoad(links=[link] * 16_384)), is_first=True)


def test_a_gateway_keeps_a_bounded_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_WORKERS", 2)
    registry = WorkerRegistry(3.0, 5.0)
    for name in ("a", "b", "a"):
        registry.register(an_info(worker_id=name), pb.LoadReport())
    with pytest.raises(Overloaded, match="2 workers are registered"):
        registry.register(an_info(worker_id="c"), pb.LoadReport())


# --------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("127.0.0.1:8701", "ipv4:127.0.0.1:40000"),
        ("127.0.0.2:8701", "ipv4:127.0.0.1:40000"),
        ("[::1]:8701", "ipv6:%5B::1%5D:40000"),
        ("127.0.0.1:8701", "unix:"),
        ("localhost:8701", "ipv4:127.0.0.1:40000"),
        ("203.0.113.9:8701", "ipv4:203.0.113.9:40000"),
        ("203.0.113.9:8701", "ipv6:%5B::ffff:203.0.113.9%5D:40000"),
        ("[fe80::7]:8701", "ipv6:%5Bfe80::7%25eth0%5D:40000"),
        ("10.1.2.3:8701", "ipv4:203.0.113.9:40000"),  # by --worker-networks
    ],
)
async def test_a_process_registers_addresses_of_its_own_host_and_of_allowed_networks(address: str, peer: str) -> None:
    await WorkerAddresses(parse_networks(["10.0.0.0/8"])).check(address, peer)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("203.0.113.10:8701", "ipv4:203.0.113.9:40000"),
        ("127.0.0.1:8701", "ipv4:203.0.113.9:40000"),  # the gateway's own loopback
        ("localhost:8701", "ipv4:203.0.113.9:40000"),
        ("203.0.113.10:8701", "ipv4:127.0.0.1:40000"),
        ("203.0.113.10:8701", "unix:"),
        ("0.0.0.0:8701", "ipv4:127.0.0.1:40000"),
        ("[::]:8701", "ipv6:%5B::1%5D:40000"),
        ("127.0.0.1:0", "ipv4:127.0.0.1:40000"),
        ("no-such-host.invalid:8701", "ipv4:127.0.0.1:40000"),
        ("x" * 70 + ".example:8701", "ipv4:127.0.0.1:40000"),
        ("unix:/run/somebody.sock", "ipv4:127.0.0.1:40000"),
        ("dns:///somewhere:1", "ipv4:127.0.0.1:40000"),
        ("nonsense", "ipv4:127.0.0.1:40000"),
    ],
)
async def test_any_other_address_is_refused_by_name(address: str, peer: str) -> None:
    with pytest.raises(InvalidRequest, match=r"info\.address") as refused:
        await WorkerAddresses().check(address, peer)
    assert refused.value.field == "info.address"


async def test_a_gateway_does_not_dial_where_a_stranger_points() -> None:
    async with control_plane() as stub:
        with pytest.raises(InvalidRequest, match="--worker-networks"):
            await stub.Register(cp.RegisterRequest(info=an_info(address="203.0.113.10:8701")))


def test_the_peers_address_is_read_as_grpc_writes_it() -> None:
    assert [str(peer_ip(peer)) for peer in ("ipv4:1.2.3.4:5", "ipv6:%5B::1%5D:5", "ipv6:[::ffff:1.2.3.4]:5")] == [
        "1.2.3.4",
        "::1",
        "1.2.3.4",
    ]
    assert peer_ip("unix:/path") is None


def test_a_network_that_is_none_is_refused_with_the_form() -> None:
    with pytest.raises(ValueError, match=r"such as 10\.0\.0\.0/8"):
        parse_networks(["10.0.0.0/33"])
