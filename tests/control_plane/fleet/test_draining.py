"""An operator drains a worker by its id or name, and every refusal says why and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane.accounts.errors import NoSuchThing
from control_plane.api.http.errors import public_message
from control_plane.fleet.draining import WorkerDrain
from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
from tandem_runtime.errors import InvalidRequest, StaleIncarnation, TandemError, Unavailable, Unsupported
from tandem_runtime.server import GrpcServer

NOBODY = "127.0.0.1:1"


class Worker(worker_pb2_grpc.WorkerServiceServicer, worker_pb2_grpc.EncodeServiceServicer):
    """Answers `Drain` as it is told; the other calls are not implemented."""

    def __init__(self, refusal: TandemError | None = None) -> None:
        self.refusal = refusal
        self.asked: list[tuple[str, bool]] = []

    async def Drain(self, request: DrainRequest, context: Any) -> DrainReply:
        self.asked.append((request.incarnation, request.resume))
        if self.refusal is not None:
            raise self.refusal
        return DrainReply(state=pb.WORKER_STATE_READY if request.resume else pb.WORKER_STATE_DRAINING)


def new_worker(refusal: TandemError | None = None) -> Worker:
    return Worker(refusal)  # type: ignore[abstract]


@contextlib.asynccontextmanager
async def served(worker: Worker | None) -> AsyncIterator[str]:
    """Serve a worker, or with None one of a release that has no such call; yield its address."""

    def add(server: Any) -> None:
        if worker is not None:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            worker_pb2_grpc.add_EncodeServiceServicer_to_server(worker, server)

    server = GrpcServer("127.0.0.1:0", add, [])
    yield await server.start()
    await server.stop(0)


def fleet(*workers: tuple[str, pb.WorkerRole.ValueType, str]) -> WorkerRegistry:
    """Return a registry of ready workers with these names, roles and addresses; their ids are `id of NAME`."""
    registry = WorkerRegistry(3.0, 5.0)
    for name, role, address in workers:
        info = pb.WorkerInfo(
            worker_id=f"id of {name}",
            incarnation=f"life of {name}",
            role=role,
            address=address,
            host_id="h",
            settings={"worker_id": name},
        )
        if role != pb.WORKER_ROLE_KV:
            info.card.CopyFrom(pb.ModelCard(model_id="m", context_length=512, block_size=16))
        registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
    return registry


@pytest.mark.parametrize("role", [pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE])
@pytest.mark.parametrize("name", ["w", "id of w"])
async def test_a_worker_of_any_role_drains_and_resumes(role: pb.WorkerRole.ValueType, name: str) -> None:
    worker = new_worker()
    async with served(worker) as address:
        drain = WorkerDrain(fleet(("w", role, address)))
        drained = await drain.drain(name, resume=False)
        resumed = await drain.drain(name, resume=True)
    assert (drained.state, resumed.state, drained.name) == ("draining", "ready", "w")
    assert worker.asked == [("life of w", False), ("life of w", True)]


async def test_the_last_worker_of_a_role_says_what_clients_notice() -> None:
    async with served(new_worker()) as address:
        registry = fleet(
            ("p", pb.WORKER_ROLE_PREFILL, address),
            ("d0", pb.WORKER_ROLE_DECODE, address),
            ("d1", pb.WORKER_ROLE_DECODE, address),
        )
        drain = WorkerDrain(registry)
        prefill, one_of_two = await drain.drain("p", resume=False), await drain.drain("d0", resume=False)
        assert "decode workers compute prompts meanwhile" in drain.consequence(prefill)
        assert drain.consequence(one_of_two) == ""
        registry.deregister("id of d1", "life of d1")
        last = await drain.drain("d0", resume=False)
        assert "refused" in drain.consequence(last)
        assert drain.consequence(await drain.drain("d0", resume=True)) == ""


@pytest.mark.parametrize(
    ("refusal", "raised", "words"),
    [
        (InvalidRequest("it is about to end", field="worker"), InvalidRequest, "w: it is about to end"),
        (StaleIncarnation("another life"), Unavailable, "w has just been started again; ask again"),
    ],
)
async def test_a_workers_refusal_names_the_worker(refusal: TandemError, raised: type[TandemError], words: str) -> None:
    async with served(new_worker(refusal)) as address:
        drain = WorkerDrain(fleet(("w", pb.WORKER_ROLE_DECODE, address)))
        with pytest.raises(raised) as caught:
            await drain.drain("w", resume=False)
    assert public_message(caught.value) == words


async def test_a_worker_of_an_older_release_says_what_to_do_instead() -> None:
    async with served(None) as address:
        drain = WorkerDrain(fleet(("w", pb.WORKER_ROLE_DECODE, address)))
        with pytest.raises(Unsupported, match="w is of a release that cannot drain; upgrade it, or stop it"):
            await drain.drain("w", resume=False)


async def test_a_worker_that_is_dead_is_named_and_the_operator_reads_it() -> None:
    drain = WorkerDrain(fleet(("decode-7", pb.WORKER_ROLE_DECODE, NOBODY)))
    with pytest.raises(Unavailable) as caught:
        await drain.drain("decode-7", resume=False)
    assert public_message(caught.value).startswith("decode-7 does not answer")


@pytest.mark.parametrize(
    ("name", "raised", "words"),
    [
        ("nobody", NoSuchThing, "no worker has this id"),
        ("twin", NoSuchThing, "2 workers have this name; use an id"),
        ("kv", InvalidRequest, "kv is a KV service, .* drain the workers of host h"),
    ],
)
async def test_what_cannot_be_drained_says_why(name: str, raised: type[TandemError], words: str) -> None:
    registry = fleet(("kv", pb.WORKER_ROLE_KV, NOBODY), ("twin", pb.WORKER_ROLE_DECODE, NOBODY))
    info = pb.WorkerInfo(worker_id="other", incarnation="o", role=pb.WORKER_ROLE_DECODE, settings={"worker_id": "twin"})
    registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
    with pytest.raises(raised, match=words):
        await WorkerDrain(registry).drain(name, resume=False)
