"""A worker that leaves the registry in the middle of a call costs a retry, over real gRPC."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import grpc

from control_plane.dispatch.encoding import MAX_PART_INPUTS, EncodingDispatch
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.registry import WorkerRegistry
from control_plane.generation import EncoderFacts, EncoderInput, EncodingRequest, TokenIds
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.kv.spaces import model_identity
from tests.control_plane.api.model import description

MODEL = description(
    identity=model_identity(pb.Fingerprint()).hex(), task="text-embedding", encoder=EncoderFacts(2, (), "mean", True)
)


class Encoder(worker_pb2_grpc.EncodeServiceServicer):
    def __init__(self, *, is_silent: bool) -> None:
        self.is_silent = is_silent
        self.was_called = asyncio.Event()

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeReply:
        self.was_called.set()
        if self.is_silent:
            await asyncio.Future()
        ids = [TokenIds.unpack(each.token_ids) for each in request.inputs]
        return pb.EncodeReply(values=b"".join(struct.pack("<2f", len(each), each[0]) for each in ids))

    def Grants(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetAsset(self, request: pb.AssetRequest, context: Any) -> Any:
        raise NotImplementedError

    def Stats(self, request: pb.StatsRequest, context: Any) -> Any:
        raise NotImplementedError


async def _start(registry: WorkerRegistry, name: str, encoder: Encoder, num_tokens: int) -> grpc.aio.Server:
    server = grpc.aio.server()
    worker_pb2_grpc.add_EncodeServiceServicer_to_server(encoder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    card = pb.ModelCard(model_id=MODEL.model_id, task="text-embedding", encoder=pb.EncoderCard(num_values=2))
    card.fingerprint.digest = bytes.fromhex(MODEL.fingerprint)
    address = f"127.0.0.1:{port}"
    info = pb.WorkerInfo(
        worker_id=name, incarnation=f"{name}-1", role=pb.WORKER_ROLE_ENCODE, address=address, card=card
    )
    registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, num_tokens_in_flight=num_tokens))
    return server


async def test_a_worker_that_leaves_during_a_call_costs_no_text_its_vector() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    clients = EncoderClients(registry)
    dispatch = EncodingDispatch(registry, clients, 5.0, 8)
    silent = Encoder(is_silent=True)
    servers = [await _start(registry, "silent", silent, 0)]
    servers.append(await _start(registry, "good", Encoder(is_silent=False), 50))
    texts = [EncoderInput(TokenIds([index, 1, 2]).packed()) for index in range(2 * MAX_PART_INPUTS + 2)]
    request = EncodingRequest("r", "me", MODEL, texts, time.monotonic() + 20)
    try:
        running = asyncio.create_task(dispatch.encode(request, []))
        await asyncio.wait_for(silent.was_called.wait(), 10)
        registry.deregister("silent", "silent-1")
        values = await asyncio.wait_for(running, 15)
    finally:
        await clients.close()
        await asyncio.gather(*(server.stop(0) for server in servers))
    assert values == b"".join(struct.pack("<2f", 3, index) for index in range(len(texts)))
