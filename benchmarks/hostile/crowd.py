"""Many stand-in workers in one process: `python -m benchmarks.hostile.crowd CONTROL --num-workers 500`.

Each registers under its own name, serves Attach and answers heartbeats; none takes a request. On SIGUSR1 all of them
reconnect at once, each as a new incarnation.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.gateway.stand_in_worker import model_card
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_engine.demo import checkpoint_path
from tandem_runtime import identity, lifecycle, log
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer

MODEL = "crowd"


class _Crowd(worker_pb2_grpc.WorkerServiceServicer):
    """tandem.v1.WorkerService of all of them, at one address."""

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        hello = (await anext(aiter(request_iterator))).hello
        yield pb.Event(hello=pb.AttachHello(worker_incarnation=hello.worker_incarnation))
        async for _ in request_iterator:
            pass  # its state is LOADING: no request comes

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        (name,) = [asset.name for asset in model_card().assets if asset.digest == request.digest]
        yield pb.Chunk(data=(checkpoint_path() / name).read_bytes())

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(load=_load())

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        return TablesReply()


def _load() -> pb.LoadReport:
    return pb.LoadReport(state=pb.WORKER_STATE_LOADING)


async def serve(control: list[str], num_workers: int, drain: asyncio.Event) -> int:
    """Register and answer until `drain` is set."""
    crowd = _Crowd()

    def register(server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(crowd, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.WorkerService"])
    address = await server.start()
    server.set_serving(True)
    card = model_card()
    card.model_id = MODEL
    again = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, again.set)
    draining = asyncio.ensure_future(drain.wait())
    while not drain.is_set():
        again.clear()
        registrars = [_start(control, index, address, card) for index in range(num_workers)]
        print("registering", flush=True)
        repeated = asyncio.ensure_future(again.wait())
        await asyncio.wait({draining, repeated}, return_when=asyncio.FIRST_COMPLETED)
        repeated.cancel()
        await asyncio.gather(*(registrar.stop() for registrar in registrars))
    await server.stop(0)
    return 0


def _start(control: list[str], index: int, address: str, card: pb.ModelCard) -> Registrar:
    info = pb.WorkerInfo(
        worker_id=f"crowd-{index}",
        incarnation=identity.new_incarnation(),
        role=pb.WORKER_ROLE_DECODE,
        host_id=f"host-{index // 8}",
        address=address,
        card=card,
    )
    registrar = Registrar(control, info, _load)
    registrar.start()
    return registrar


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.hostile.crowd", description=__doc__)
    options.add_argument("control", nargs="+", metavar="CONTROL", help="gRPC addresses of gateways")
    options.add_argument("--num-workers", type=int, default=500)
    given = options.parse_args()
    log.configure("tandem-crowd", level="warning")
    return lifecycle.run(lambda drain: serve(given.control, given.num_workers, drain))


if __name__ == "__main__":
    sys.exit(main())
