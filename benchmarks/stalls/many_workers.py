"""Many stand-in workers of one model in one process, at one address, that answer and grant.

`python -m benchmarks.stalls.many_workers CONTROL ... --num-workers 1000` registers them, eight to a host.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.gateway.seat_grants import SeatGrants
from benchmarks.gateway.stand_in_worker import BLOCK_SIZE, GatewayStream, Words, asset_chunks, model_card
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_engine.demo import checkpoint_path
from tandem_runtime import identity, lifecycle, log
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer

NUM_SEATS = 8
_TOKEN_SECONDS = 0.05
_WORKERS_PER_HOST = 8
_POOL_BLOCKS = 1 << 16


class _Worker:
    def __init__(self, index: int, address: str, card: pb.ModelCard) -> None:
        self._streams: set[GatewayStream] = set()
        self.grants = SeatGrants(NUM_SEATS, lambda: self.num_running)
        self.info = pb.WorkerInfo(
            worker_id=f"worker-{index}",
            incarnation=identity.new_incarnation(),
            role=pb.WORKER_ROLE_DECODE,
            host_id=f"host-{index // _WORKERS_PER_HOST}",
            settings={"max_num_seqs": str(NUM_SEATS)},
            address=address,
            card=card,
        )

    @property
    def num_running(self) -> int:
        return sum(each.load() for each in self._streams)

    def load(self) -> pb.LoadReport:
        pool = pb.KvPool(num_total_blocks=_POOL_BLOCKS, num_free_blocks=_POOL_BLOCKS, tokens_per_block=BLOCK_SIZE)
        return pb.LoadReport(state=pb.WORKER_STATE_READY, kv=pool, num_running=self.num_running)

    async def events(self, words: Words, commands: AsyncIterator[pb.Command]) -> AsyncIterator[pb.Event]:
        """Yield what one Attach stream says after its hello."""
        stream = GatewayStream(
            words, _TOKEN_SECONDS, has_room=lambda _: self.num_running < NUM_SEATS, grants=self.grants
        )
        self._streams.add(stream)
        self.grants.attach(stream)
        reader = asyncio.create_task(stream.read(commands))
        try:
            async for event in stream.events():
                yield event
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self.grants.detach(stream)


class _Workers(worker_pb2_grpc.WorkerServiceServicer):
    """tandem.v1.WorkerService of all of them: a gateway's hello says which one is meant."""

    def __init__(self) -> None:
        self._words = Words(checkpoint_path())
        self._card = model_card()
        self._by_incarnation: dict[str, _Worker] = {}

    def add(self, index: int, address: str) -> _Worker:
        worker = _Worker(index, address, self._card)
        self._by_incarnation[worker.info.incarnation] = worker
        return worker

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        commands = aiter(request_iterator)
        incarnation = (await anext(commands)).hello.worker_incarnation
        hello = pb.AttachHello(worker_incarnation=incarnation, takes_choices=True, uses_grants=True, counts_events=True)
        yield pb.Event(hello=hello)
        async for event in self._by_incarnation[incarnation].events(self._words, commands):
            yield event

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        for chunk in asset_chunks(checkpoint_path(), self._card, request.digest):
            yield chunk

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply()

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        return TablesReply()


async def serve(control: list[str], num_workers: int, drain: asyncio.Event) -> int:
    """Register and answer until `drain` is set."""
    workers = _Workers()

    def register(server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.WorkerService"])
    address = await server.start()
    server.set_serving(True)
    added = [workers.add(index, address) for index in range(num_workers)]
    registrars = [Registrar(control, worker.info, worker.load) for worker in added]
    for registrar in registrars:
        registrar.start()
    await drain.wait()
    await asyncio.gather(*(registrar.stop() for registrar in registrars))
    await server.stop(0)
    return 0


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.stalls.many_workers", description=__doc__)
    options.add_argument("control", nargs="+", metavar="CONTROL", help="gRPC addresses of gateways")
    options.add_argument("--num-workers", type=int, default=1000)
    given = options.parse_args()
    log.configure("tandem-workers", level="warning")
    return lifecycle.run(lambda drain: serve(given.control, given.num_workers, drain))


if __name__ == "__main__":
    sys.exit(main())
