"""A worker is known to every control-plane replica, whichever of them starts, ends or restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem.v1.control_plane_pb2_grpc import ControlPlaneServiceServicer, add_ControlPlaneServiceServicer_to_server
from tandem_runtime import errors, registration
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer

PUBLIC_KEY = bytes(range(32))


class ControlPlane(ControlPlaneServiceServicer):
    """A whole control-plane replica as workers see it: who is known, and what they last said."""

    def __init__(self) -> None:
        self.workers: dict[str, cp.RegisterRequest] = {}
        self.beats: list[cp.HeartbeatRequest] = []
        self.num_registrations = 0
        self.replicas: list[str] = []
        self.kv_services: list[cp.KvServiceAddress] = []
        self.public_keys = [PUBLIC_KEY]
        self.link_key = b""
        self.refuse: errors.TandemError | None = None
        self.has_stream = True
        self.refuse_beat: errors.TandemError | None = None
        """Raised for the next heartbeat."""
        self.silent = False
        """Whether it answers no more heartbeats, as a process that was stopped."""
        self.num_streams = 0
        self._context: Any = None
        self._writing = asyncio.Lock()
        self.next_ms = 0
        self.num_calls = 0
        """Heartbeats that came as calls of their own."""
        self.address = ""
        self._changed = asyncio.Condition()
        self._server: GrpcServer | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        def register(server: Any) -> None:
            add_ControlPlaneServiceServicer_to_server(self, server)

        self._server = GrpcServer(address, register, ["tandem.v1.ControlPlaneService"])
        self.address = await self._server.start()
        return self.address

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        if self.refuse is not None:
            raise self.refuse
        async with self._changed:
            self.workers[request.info.worker_id] = request
            self.num_registrations += 1
            self._changed.notify_all()
        return cp.RegisterReply(
            heartbeat_interval_ms=20,
            replicas=self.replicas,
            handle_public_keys=self.public_keys,
            link_key=self.link_key,
            kv_services=self.kv_services,
        )

    async def Heartbeats(  # type: ignore[override]
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> None:
        if not self.has_stream:
            raise errors.Unsupported("Method not found!")
        self.num_streams += 1
        self._context = context
        async for request in requests:
            await self.say(await self._heard(request))

    async def say(self, reply: cp.HeartbeatReply) -> None:
        """Write to the latest stream."""
        async with self._writing:
            await self._context.write(reply)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        self.num_calls += 1
        return await self._heard(request)

    async def _heard(self, request: cp.HeartbeatRequest) -> cp.HeartbeatReply:
        if self.beats and self.silent:
            await asyncio.Event().wait()
        if self.refuse_beat is not None:
            error, self.refuse_beat = self.refuse_beat, None
            raise error
        async with self._changed:
            self.beats.append(request)
            self._changed.notify_all()
        known = request.worker_id in self.workers
        return cp.HeartbeatReply(
            known=known, replicas=self.replicas, kv_services=self.kv_services, next_ms=self.next_ms
        )

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        async with self._changed:
            self.workers.pop(request.worker_id, None)
            self._changed.notify_all()
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        return cp.ListWorkersReply()

    async def until(self, condition: Callable[[ControlPlane], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def more_beats(self) -> None:
        """Return after two more beats: what the first one's reply said has been taken up by then."""
        num_beats = len(self.beats)
        await self.until(lambda self: len(self.beats) >= num_beats + 2)


def knows_w1(control: ControlPlane) -> bool:
    return "w1" in control.workers


def has_beats(num: int, control: ControlPlane) -> bool:
    return len(control.beats) == num


INFO = pb.WorkerInfo(worker_id="w1", incarnation="00000000000000aa", role=pb.WORKER_ROLE_DECODE, host_id="h1")


def ready() -> pb.LoadReport:
    return pb.LoadReport(state=pb.WORKER_STATE_READY, num_running=3)


@asynccontextmanager
async def registrar(*control: str, load: Callable[[], pb.LoadReport] = ready, **more: Any) -> AsyncIterator[Registrar]:
    registrar = Registrar(control, INFO, load, **more)
    registrar.start()
    try:
        yield registrar
    finally:
        await registrar.stop()


async def free_address() -> str:
    control = ControlPlane()
    address = await control.start()
    await control.kill()
    return address


async def test_a_worker_registers_beats_and_takes_its_leave() -> None:
    control = ControlPlane()
    replies: list[cp.RegisterReply] = []
    async with registrar(await control.start(), on_registered=replies.append) as worker:
        assert (worker.kv_keys, worker.kv_service(), worker.num_registered) == (KvKeys(), None, 0)
        async with asyncio.timeout(20):
            await worker.wait_registered()
        assert (worker.kv_keys, worker.num_registered) == (KvKeys((PUBLIC_KEY,)), 1)
        assert [list(reply.handle_public_keys) for reply in replies] == [[PUBLIC_KEY]]
        await control.more_beats()
        assert control.workers["w1"].info == INFO
        assert control.beats[0].load == ready()
        assert (control.beats[0].worker_id, control.beats[0].incarnation) == ("w1", INFO.incarnation)
        assert control.num_registrations == 1
        assert (control.num_streams, control.num_calls) == (1, 0), "all heartbeats are on one stream"
    assert control.workers == {}
    await control.kill()


async def test_a_control_plane_of_an_earlier_release_gets_a_call_for_each_heartbeat() -> None:
    control = ControlPlane()
    control.has_stream = False
    async with registrar(await control.start()) as worker:
        await control.until(knows_w1)
        await control.more_beats()
        assert (control.num_calls, control.num_streams, control.num_registrations) == (len(control.beats), 0, 1)
        assert worker.num_registered == 1
        # its successor at this address has the stream
        await control.kill()
        successor = ControlPlane()
        await successor.start(control.address)
        await successor.until(knows_w1)
        await successor.more_beats()
        assert successor.num_streams == 1
        assert successor.num_calls <= 1, "the one that found out that this is another process"
    await successor.kill()


async def test_a_control_plane_that_does_not_reply_to_a_heartbeat_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "CALL_SECONDS", 0.2)
    control = ControlPlane()
    async with registrar(await control.start()):
        await control.until(lambda control: bool(control.beats))
        control.silent = True
        await control.until(lambda control: control.num_registrations == 2)
        control.silent = False
        await control.until(lambda control: control.num_streams >= 2)
        await control.more_beats()
    await control.kill()


async def test_a_control_plane_that_hears_from_the_host_gets_few_heartbeats_and_may_ask_for_one() -> None:
    control = ControlPlane()
    control.next_ms = 3_600_000
    async with registrar(await control.start()) as worker:
        await control.until(lambda control: bool(control.beats))
        service = cp.KvServiceAddress(address="a:1", incarnation="k1", host_id="h1")
        control.kv_services = [service]
        for num_beats in (2, 3):  # far sooner than in an hour
            await control.say(cp.HeartbeatReply(known=True, kv_services=[service]))
            await control.until(partial(has_beats, num_beats))
        assert worker.kv_service() == service, "of the question already"
        # What the worker itself has to say does not wait either.
        worker.beat_now()
        await control.until(partial(has_beats, 4))
        assert (control.num_streams, control.num_registrations) == (1, 1)
        # Nor does a control plane that was started anew.
        await control.kill()
        again = ControlPlane()
        await again.start(control.address)
        await again.until(knows_w1)
    await again.kill()


async def test_a_heartbeat_that_is_refused_ends_the_stream_and_the_worker_registers_again() -> None:
    control = ControlPlane()
    async with registrar(await control.start()):
        await control.until(lambda control: bool(control.beats))
        control.refuse_beat = errors.StaleIncarnation("worker w1 is another process now")
        await control.until(lambda control: control.num_registrations == 2)
        await control.more_beats()
        assert (control.num_streams, control.num_calls) == (2, 0)
    await control.kill()


async def test_a_worker_may_be_first_and_the_control_plane_come_later() -> None:
    address = await free_address()
    control = ControlPlane()
    async with registrar(address) as worker:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await worker.wait_registered()
        await control.start(address)
        await control.until(knows_w1)
        async with asyncio.timeout(20):
            await worker.wait_registered()
    await control.kill()


async def test_a_control_plane_that_restarts_on_its_port_knows_the_worker_again() -> None:
    first = ControlPlane()
    address = await first.start()
    async with registrar(address) as worker:
        await first.until(knows_w1)
        await first.kill()
        second = ControlPlane()
        await second.start(address)
        await second.until(knows_w1)
        await second.more_beats()
        assert worker.num_registered == 1
    await second.kill()


async def test_a_control_plane_that_forgot_the_worker_is_told_again_at_once() -> None:
    control = ControlPlane()
    async with registrar(await control.start()):
        await control.until(knows_w1)
        control.workers.clear()
        await control.until(knows_w1)
        assert control.num_registrations == 2
    await control.kill()


async def test_every_replica_that_a_reply_names_is_told_too_and_left_with_a_goodbye() -> None:
    first, second = ControlPlane(), ControlPlane()
    first.replicas = second.replicas = [await first.start(), await second.start()]
    async with registrar(first.address) as worker:
        await second.until(knows_w1)
        await second.more_beats()
        assert worker.num_registered == 2
    assert (first.workers, second.workers) == ({}, {})
    await first.kill()
    await second.kill()


async def test_a_learned_replica_is_kept_while_the_given_one_is_away() -> None:
    first, second = ControlPlane(), ControlPlane()
    first.replicas = second.replicas = [await first.start(), await second.start()]
    async with registrar(first.address) as worker:
        await second.until(knows_w1)
        await first.kill()
        await second.more_beats()
        assert worker.num_registered >= 1
        again = ControlPlane()
        again.replicas = first.replicas
        await again.start(first.address)
        await again.until(knows_w1)
    await again.kill()
    await second.kill()


async def test_while_the_secret_is_changed_the_keys_of_all_replicas_are_valid() -> None:
    old, new = b"\1" * 32, b"\2" * 32
    first, second = ControlPlane(), ControlPlane()
    first.replicas = second.replicas = [await first.start(), await second.start()]
    first.public_keys, first.link_key = [old], b"old link key"
    second.public_keys, second.link_key = [new], b"the new link key"
    async with registrar(first.address) as worker:
        # 1. the second gateway has the new secret: handles of both are verified
        await second.until(knows_w1)
        await second.more_beats()
        assert worker.kv_keys.public_keys == (old, new)
        assert worker.kv_keys.link_key == b"the new link key", "any of them, the same in every KV service"
        # 2. while a gateway is away, its handles stay valid
        await first.kill()
        await second.more_beats()
        assert worker.kv_keys.public_keys == (old, new)
        # 3. the first one comes back with the new secret: the old key is forgotten
        again = ControlPlane()
        again.replicas, again.public_keys, again.link_key = first.replicas, [new], b"the new link key"
        await again.start(first.address)
        await again.until(knows_w1)
        await again.more_beats()
        assert worker.kv_keys == KvKeys((new,), b"the new link key")
    await again.kill()
    await second.kill()


async def test_a_replica_that_is_gone_and_that_nobody_names_is_forgotten() -> None:
    first, second = ControlPlane(), ControlPlane()
    first.replicas = second.replicas = [await first.start(), await second.start()]
    async with registrar(first.address) as worker:
        await second.until(knows_w1)
        first.replicas = [first.address]
        await second.kill()
        await first.until(lambda _: second.address not in worker._replicas)
        assert list(worker._replicas) == [first.address]
    await first.kill()


async def test_an_updated_card_reaches_every_replica_before_the_next_beat_is_due() -> None:
    control = ControlPlane()
    async with registrar(await control.start()) as worker:
        await control.until(knows_w1)
        changed = pb.WorkerInfo()
        changed.CopyFrom(INFO)
        changed.card.model_id = "@tandem/demo"
        changed.kv_address = "127.0.0.1:9"
        worker.update_info(changed)
        await control.until(lambda control: control.workers["w1"].info.card.model_id == "@tandem/demo")
        await control.more_beats()
        assert control.beats[-1].kv_address == "127.0.0.1:9"
        assert INFO.card.model_id == ""
    await control.kill()


async def test_a_state_that_changed_need_not_wait_for_the_next_beat() -> None:
    state = pb.WORKER_STATE_READY
    control = ControlPlane()
    async with registrar(await control.start(), load=lambda: pb.LoadReport(state=state)) as worker:
        await control.until(lambda control: bool(control.beats))
        worker._replicas[control.address]._interval_seconds = 3600
        state = pb.WORKER_STATE_DRAINING
        worker.beat_now()
        await control.until(lambda control: control.beats[-1].load.state == pb.WORKER_STATE_DRAINING)
    await control.kill()


async def test_the_kv_service_is_the_one_of_this_host_and_follows_its_restarts() -> None:
    control = ControlPlane()
    other = cp.KvServiceAddress(address="b:1", incarnation="k0", host_id="h2")
    control.kv_services = [other, cp.KvServiceAddress(address="a:1", incarnation="k1", host_id="h1", socket="/s")]
    async with registrar(await control.start()) as worker:
        async with asyncio.timeout(20):
            await worker.wait_registered()
        service = worker.kv_service()
        assert service is not None and (service.address, service.incarnation, service.socket) == ("a:1", "k1", "/s")
        control.kv_services = [cp.KvServiceAddress(address="a:2", incarnation="k2", host_id="h1")]
        await control.more_beats()
        service = worker.kv_service()
        assert service is not None and (service.address, service.incarnation) == ("a:2", "k2")
        control.kv_services = [other]
        await control.more_beats()
        assert worker.kv_service() is None
    await control.kill()


async def test_a_refused_worker_asks_again_until_it_is_taken() -> None:
    control = ControlPlane()
    control.refuse = errors.FingerprintMismatch("weights differ", field="weights_digest")
    async with registrar(await control.start()) as worker:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await worker.wait_registered()
        control.refuse = None
        await control.until(knows_w1)
    await control.kill()


async def test_a_load_report_that_breaks_once_does_not_end_the_beats() -> None:
    failures = [ZeroDivisionError("division by zero")]

    def load() -> pb.LoadReport:
        if failures:
            raise failures.pop()
        return ready()

    control = ControlPlane()
    async with registrar(await control.start(), load=load):
        await control.until(knows_w1)
        await control.more_beats()
    await control.kill()


async def test_a_control_plane_that_is_away_does_not_hold_up_the_end() -> None:
    control = ControlPlane()
    async with registrar(await control.start()) as worker:
        await control.until(knows_w1)
        await control.kill()
        async with asyncio.timeout(registration.GOODBYE_SECONDS + 5):
            await worker.stop()
        assert worker.num_registered == 0


async def test_processes_that_registered_together_do_not_beat_together(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []

    def uniform(low: float, high: float) -> float:
        drawn.append(random.uniform(low, high))
        return drawn[-1]

    monkeypatch.setattr(registration, "random", SimpleNamespace(uniform=uniform))
    control = ControlPlane()
    async with registrar(await control.start()):
        for _ in range(10):
            await control.more_beats()
    await control.kill()
    assert len(drawn) >= 20 and len(set(drawn)) == len(drawn), "each pause between two beats is another one"
    assert all(0.8 <= share <= 1.0 for share in drawn), "and none is longer than the interval"
