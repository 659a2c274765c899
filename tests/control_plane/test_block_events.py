"""A gateway's index follows the block events of real KV services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from control_plane.block_chain import BlockHashes
from control_plane.block_events import BlockEventReader
from control_plane.fleet.registration import take_relayed
from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.prefix_index import PrefixMatch
from control_plane.routing.sample_points import SamplePointIndex
from kv_transfer_svc import event_stream
from kv_transfer_svc.host_points import HostPoints
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import Unavailable, Unsupported
from tandem_runtime.server import GrpcServer
from tests.certificates import Authority
from tests.kv_transfer_svc.host import Host, running_host, running_writer, until
from tests.kv_transfer_svc.test_block_events import publish
from tests.kv_transfer_svc.test_host_cache import chain
from tests.ports import free_port

CHAIN = BlockHashes(b"".join(chain(40)))


def service_info(address: str, worker_id: str, incarnation: str = "kv-life") -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker_id, incarnation=incarnation, role=pb.WORKER_ROLE_KV, host_id="host-a", address=address
    )


READY = pb.LoadReport(state=pb.WORKER_STATE_READY)


class Gateway:
    """A registry, an index and the reader between them."""

    def __init__(self, member: FleetMember | None = None) -> None:
        self.registry = WorkerRegistry(5.0, 10.0)
        self.index = SamplePointIndex()
        self.reader = BlockEventReader(
            self.index, self.registry, "gateway-1", member, partial(take_relayed, self.registry)
        )

    def find(self) -> PrefixMatch:
        return self.index.find(CHAIN)


@asynccontextmanager
async def a_gateway(member: FleetMember | None = None) -> AsyncIterator[Gateway]:
    gateway = Gateway(member)
    try:
        yield gateway
    finally:
        await gateway.reader.close()


async def test_a_gateway_knows_what_a_store_has_and_what_it_evicts(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_gateway() as gateway:
        await publish(writer, CHAIN[:34])
        host.service.sweep()
        gateway.registry.register(service_info(host.address, "kv-1"), READY)
        await until(lambda: gateway.find().hosts == {"host-a": 32})
        host.service.points.change("decode-1", [block_hash[:8] for block_hash in CHAIN[:2]], [])
        await until(lambda: gateway.find().pools == {"decode-1": 2})
        host.service.points.change("", [], [block_hash[:8] for block_hash in CHAIN[15:32]])
        await until(lambda: gateway.find() == PrefixMatch({"decode-1": 2}, {"host-a": 8}))
        host.service.points.end("decode-1")
        await until(lambda: gateway.find() == PrefixMatch({}, {"host-a": 8}))


async def test_a_host_passes_on_the_heartbeats_of_its_workers_and_of_no_others(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, a_gateway() as gateway:
        registry = gateway.registry
        registry.register(service_info(host.address, "kv-1"), READY)
        for name, host_id in (("here", "host-a"), ("there", "host-b")):
            registry.register(
                pb.WorkerInfo(worker_id=name, incarnation=name, role=pb.WORKER_ROLE_DECODE, host_id=host_id), READY
            )

        def beat(name: str, num_running: float, incarnation: str = "") -> bool:
            load = pb.LoadReport(state=pb.WORKER_STATE_READY, counters={"number": num_running})
            request = cp.HeartbeatRequest(worker_id=name, incarnation=incarnation or name, load=load)
            host.service.points.heartbeat(request)
            return False

        def number_of(name: str) -> float:
            worker = registry.get(name)
            return worker.load.counters["number"] if worker is not None else -1.0

        await until(lambda: beat("kv-1", 4, "kv-life") or number_of("kv-1") == 4)  # once the stream is open
        with capture_logs() as lines:
            beat("here", float("nan"))
            await until(lambda: "heartbeat_refused" in [line["event"] for line in lines])
        for name, incarnation in (("there", ""), ("nobody", ""), ("here", "an earlier life")):
            beat(name, 5, incarnation)
        beat("kv-1", 6, "kv-life")  # the service's own comes after them
        await until(lambda: number_of("kv-1") == 6)
        assert (number_of("here"), number_of("there")) == (0.0, 0.0)
        beat("here", 9)
        await until(lambda: number_of("here") == 9)
        here, there = registry.get("here"), registry.get("there")
        assert here is not None and there is not None
        assert registry.is_relayed(here) and not registry.is_relayed(there)


async def test_of_two_services_of_a_host_the_one_that_lives_is_followed(tmp_path: Path) -> None:
    """A pod that is started again has another name; its dead predecessor is suspected, and then gone."""
    async with a_gateway() as gateway, running_host(tmp_path) as host:
        dead = service_info(f"127.0.0.1:{free_port()}", "kv-old", "old-life")
        gateway.registry.register(dead, READY)
        gateway.registry.register(service_info(host.address, "kv-new"), READY)
        host.service.points.change("w", [each[:8] for each in CHAIN[:4]], [])
        await until(lambda: gateway.find().pools == {"w": 4})
        followed = gateway.reader._following["host-a"]
        for state in (pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_READY):
            beat = cp.HeartbeatRequest(worker_id="kv-old", incarnation="old-life", load=pb.LoadReport(state=state))
            assert gateway.registry.heartbeat(beat)
            assert gateway.reader._following["host-a"] is followed
        gateway.registry.deregister("kv-old", "old-life")
        assert gateway.reader._following["host-a"] is followed
        assert gateway.find().pools == {"w": 4}


async def test_a_service_takes_over_from_one_that_may_not_be_used(tmp_path: Path) -> None:
    async with a_gateway() as gateway, running_host(tmp_path) as host:
        gateway.registry.register(service_info(host.address, "kv-old"), READY)
        host.service.points.change("w", [each[:8] for each in CHAIN[:4]], [])
        newest = service_info(f"127.0.0.1:{free_port()}", "kv-new", "new-life")
        gateway.registry.register(newest, pb.LoadReport(state=pb.WORKER_STATE_DRAINING))
        await until(lambda: gateway.find().pools == {"w": 4})
        gateway.registry.deregister("kv-old", "kv-life")
        assert gateway.reader._following["host-a"].worker.worker_id == "kv-new"
        gateway.registry.deregister("kv-new", "new-life")
        assert not gateway.reader._following


async def test_a_service_that_cannot_be_reached_is_called_less_often_whatever_others_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[int] = []

    def pause(num_failures: int, longest_seconds: float) -> float:
        failures.append(num_failures)
        return 0.0 if len(failures) < 4 else longest_seconds

    class Unreachable:
        async def block_events(self, questions: object) -> AsyncIterator[kv.BlockEventBatch]:
            gateway.reader.num_batches += 1  # of another host, meanwhile
            raise Unavailable("nobody listens there")
            yield kv.BlockEventBatch()

        async def close(self) -> None: ...

    monkeypatch.setattr("control_plane.block_events.pause_seconds", pause)
    monkeypatch.setattr("control_plane.block_events.KvClient", lambda *_, **__: Unreachable())
    async with a_gateway() as gateway:
        gateway.registry.register(service_info("127.0.0.1:1", "kv-1"), READY)
        await until(lambda: len(failures) == 4)
    assert failures == [1, 2, 3, 4]


async def test_a_restarted_service_and_a_lost_stream_begin_with_a_snapshot(tmp_path: Path) -> None:
    async with a_gateway() as gateway:
        async with running_host(tmp_path) as host:
            host.service.points.change("w", [each[:8] for each in CHAIN[:4]], [])
            gateway.registry.register(service_info(host.address, "kv-1"), READY)
            await until(lambda: gateway.find().pools == {"w": 4})
        # 1. The service is gone; it comes back elsewhere and knows less.
        async with running_host(tmp_path) as host:
            host.service.points.change("w", [each[:8] for each in CHAIN[:2]], [])
            gateway.registry.register(service_info(host.address, "kv-1", "second-life"), READY)
            await until(lambda: gateway.find().pools == {"w": 2})
            # 2. A stream that breaks is opened again.
            num_batches = gateway.reader.num_batches
            await host.server.stop(0)
            host.server = GrpcServer(
                host.address,
                lambda server: kv_grpc.add_KvTransferServiceServicer_to_server(host.service, server),
                [],
            )
            await host.server.start()
            host.service.points.change("w", [], [CHAIN[1][:8]])
            await until(lambda: gateway.find().pools == {"w": 1})
            assert gateway.reader.num_batches > num_batches


async def test_pools_end_with_their_workers_and_stores_with_their_services(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, a_gateway() as gateway:
        for place in ("", "w"):
            host.service.points.change(place, [each[:8] for each in CHAIN[:4]], [])
        worker = pb.WorkerInfo(worker_id="d", incarnation="w", role=pb.WORKER_ROLE_DECODE, host_id="host-a")
        gateway.registry.register(worker, READY)
        gateway.registry.register(service_info(host.address, "kv-1"), READY)
        await until(lambda: gateway.find() == PrefixMatch({"w": 4}, {"host-a": 4}))
        gateway.registry.deregister("d", "w")
        assert gateway.find() == PrefixMatch({}, {"host-a": 4})
        gateway.registry.deregister("kv-1", "kv-life")
        assert gateway.find() == PrefixMatch()


async def test_with_a_service_without_block_events_requests_teach_for_good() -> None:
    server = GrpcServer("127.0.0.1:0", lambda server: None, [])  # knows none of the methods
    address = await server.start()
    async with a_gateway() as gateway:
        now = [0.0]
        gateway.index._clock = lambda: now[0]
        gateway.registry.register(service_info(address, "kv-1"), READY)
        await until(lambda: not len(gateway.reader._tasks))  # not asked again
        gateway.index.learn(CHAIN[:8], "w", "host-a")
        now[0] = 1000.0
        assert gateway.find() == PrefixMatch({"w": 8}, {"host-a": 8})
    await server.stop(0)


async def test_a_service_of_the_release_before_reads_one_request_and_is_asked_for_no_tables() -> None:
    points, num_requests = HostPoints(), 0
    points.change("w", [each[:8] for each in CHAIN[:4]], [])

    async def block_events(request: kv.BlockEventsRequest, context: Any) -> AsyncIterator[kv.BlockEventBatch]:
        nonlocal num_requests
        num_requests += 1
        async for batch in event_stream.block_events(points):
            yield batch

    def add(server: Any) -> None:
        method = grpc.unary_stream_rpc_method_handler(
            block_events, kv.BlockEventsRequest.FromString, kv.BlockEventBatch.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("tandem.v1.KvTransferService", {"BlockEvents": method})
        server.add_generic_rpc_handlers((handler,))

    server = GrpcServer("127.0.0.1:0", add, [])
    address = await server.start()
    async with a_gateway() as gateway:
        gateway.registry.register(service_info(address, "kv-1"), READY)
        await until(lambda: gateway.find().pools == {"w": 4})
        service = gateway.registry.get("kv-1")
        assert service is not None
        questions = gateway.reader.questions(service)
        assert questions is not None
        with pytest.raises(Unsupported):
            await questions.ask(10, 10.0)
        points.change("w", [], [each[:8] for each in CHAIN[2:4]])
        await until(lambda: gateway.find().pools == {"w": 2})
        assert num_requests == 1
    await server.stop(0)


async def test_a_gateway_reads_events_under_certificates_from_the_service_that_registered(tmp_path: Path) -> None:
    authority = Authority()
    gateway_member, service, thief = (authority.member(tmp_path, role) for role in ("gateway", "kv", "kv"))
    async with a_gateway(gateway_member) as gateway, running_host(tmp_path, member=service) as host:
        points(host)
        gateway.registry.register(service_info(host.address, thief.identity.id), READY)
        gateway.registry.register(service_info(host.address, service.identity.id, "true-life"), READY)
        await until(lambda: gateway.find().pools == {"w": 4})
        assert gateway.reader.num_batches == 1 + 1


def points(host: Host) -> None:
    host.service.points.change("w", [each[:8] for each in CHAIN[:4]], [])
