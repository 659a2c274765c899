"""A stand-in for an encode worker: the built-in model's tokenizer, and vectors of ones at once.

    python -m benchmarks.gateway.stand_in_encoder CONTROL ... [--model NAME] [--num-values N]

So the cores that a benchmark measures are the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.gateway.stand_in_worker import CONTEXT_LENGTH, asset_chunks, model_card
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.demo import checkpoint_path
from tandem_runtime import identity, lifecycle, log
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer

NUM_VALUES = 384


class StandInEncoder(worker_pb2_grpc.EncodeServiceServicer):
    """tandem.v1.EncodeService, as a gateway needs it."""

    def __init__(self, model_id: str, num_values: int = NUM_VALUES, context_length: int = CONTEXT_LENGTH) -> None:
        card = model_card(checkpoint_path(), model_id, context_length)
        card.ClearField("block_size")
        card.task = "text-embedding"
        card.encoder.CopyFrom(pb.EncoderCard(num_values=num_values, pooling="mean", is_normalized=True))
        self._row = struct.pack(f"<{num_values}f", *[num_values**-0.5] * num_values)
        self.info = pb.WorkerInfo(
            worker_id=model_id,
            incarnation=identity.new_incarnation(),
            role=pb.WORKER_ROLE_ENCODE,
            host_id=identity.default_host_id(),
            card=card,
        )

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeReply:
        return pb.EncodeReply(values=self._row * len(request.inputs))

    async def Grants(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.GrantsEvent]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the stand-in takes whatever comes")
        yield pb.GrantsEvent()

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        for chunk in asset_chunks(checkpoint_path(), self.info.card, request.digest):
            yield chunk

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self.info, load=self.load())

    def load(self) -> pb.LoadReport:
        return pb.LoadReport(state=pb.WORKER_STATE_READY)


async def serve(control: list[str], worker: StandInEncoder, drain: asyncio.Event) -> int:
    """Register and answer until `drain` is set."""

    def register(server: Any) -> None:
        worker_pb2_grpc.add_EncodeServiceServicer_to_server(worker, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.EncodeService"])
    worker.info.address = await server.start()
    server.set_serving(True)
    registrar = Registrar(control, worker.info, worker.load)
    registrar.start()
    try:
        await drain.wait()
    finally:
        await registrar.stop()
        await server.stop(0)
    return 0


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway.stand_in_encoder", description=(__doc__ or "").splitlines()[0]
    )
    options.add_argument("control", nargs="+", metavar="CONTROL", help="gRPC addresses of gateways")
    options.add_argument("--model", default="embedder", help="what clients call the model")
    options.add_argument("--num-values", type=int, default=NUM_VALUES, help="dimensions of an embedding")
    options.add_argument("--context-length", type=int, default=CONTEXT_LENGTH, help="in tokens")
    given = options.parse_args()
    log.configure("tandem-stand-in", level="warning")
    worker = StandInEncoder(given.model, given.num_values, given.context_length)
    return lifecycle.run(lambda drain: serve(given.control, worker, drain))


if __name__ == "__main__":
    sys.exit(main())
