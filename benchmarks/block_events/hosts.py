"""Stands in for the KV services of many hosts: real gRPC servers that tell of pools which change all the time.

    python -m benchmarks.block_events.hosts FIRST COUNT WORKERS PROMPTS

Prints the addresses of the hosts as one JSON line, and changes pools from then on until its input ends. The first line
of its input is the address of the control plane: the workers register there, and each has a heartbeat every second,
which goes with the block events of its host. A prompt has 125 blocks of 16 tokens with its answer, and a pool tells of
the ends of both. Each worker stores a prompt in each quarter of a second, and evicts its oldest one: 500 blocks a
second each. The host's store does the same with the prompts of all its workers, and tells of no ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from control_plane.routing.sample_points import num_sample_points
from kv_transfer_svc.event_stream import block_events
from kv_transfer_svc.host_points import STORE, HostPoints
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES
from tandem_runtime import log
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer

BLOCKS_PER_PROMPT = 125
PROMPTS_PER_SECOND = 4
_SAMPLED = num_sample_points(BLOCKS_PER_PROMPT)
POINTS_PER_PROMPT = _SAMPLED + 2
NICENESS = 10
"""Hosts are other machines: they shall not take the gateway's core from it."""


class StandIn(kv_grpc.KvTransferServiceServicer):
    """One host: the points of its workers and of its store, and the stream of their changes."""

    def __init__(self, number: int, num_workers: int, num_prompts: int) -> None:
        self._points = HostPoints()
        self.number = number
        self.workers = [f"worker-{number}-{each}" for each in range(num_workers)]
        self._prompts: dict[str, deque[list[bytes]]] = {name: deque() for name in self.workers}
        for _ in range(num_prompts):
            for name in self.workers:
                self._store(name, _a_prompt())

    async def BlockEvents(
        self, requests: AsyncIterator[kv.BlockEventsRequest], context: Any
    ) -> AsyncIterator[kv.BlockEventBatch]:
        async for batch in block_events(self._points):
            yield batch

    def change(self) -> None:
        """Let each worker store a prompt and evict its oldest one."""
        for name in self.workers:
            oldest = self._prompts[name].popleft()
            self._points.change(name, [], oldest)
            self._points.change(STORE, [], oldest[:_SAMPLED])
            self._store(name, _a_prompt())

    def heartbeat(self, beat: cp.HeartbeatRequest) -> None:
        self._points.heartbeat(beat)

    def _store(self, name: str, keys: list[bytes]) -> None:
        self._prompts[name].append(keys)
        self._points.change(name, keys, [])
        self._points.change(STORE, keys[:_SAMPLED], [])


def _a_prompt() -> list[bytes]:
    drawn = os.urandom(NUM_KEY_BYTES * POINTS_PER_PROMPT)
    return [drawn[start : start + NUM_KEY_BYTES] for start in range(0, len(drawn), NUM_KEY_BYTES)]


class Beating:
    """The heartbeats of one host's workers: each goes to the KV service every second, and directly as gateways ask."""

    def __init__(self, host: StandIn, control: str) -> None:
        self._host = host
        self._registrars = [_registrar(worker, f"host-{host.number}", control) for worker in host.workers]
        for registrar in self._registrars:
            registrar.start()

    def beat(self) -> None:
        for registrar in self._registrars:
            self._host.heartbeat(registrar.heartbeat_request())

    async def stop(self) -> None:
        await asyncio.gather(*(registrar.stop() for registrar in self._registrars))


def _registrar(worker_id: str, host_id: str, control: str) -> Registrar:
    info = pb.WorkerInfo(worker_id=worker_id, incarnation=worker_id, role=pb.WORKER_ROLE_DECODE, host_id=host_id)
    info.address = "127.0.0.1:1"
    counters = {f"a counter of an engine, number {number}": 1e6 * number for number in range(30)}
    load = pb.LoadReport(state=pb.WORKER_STATE_READY, num_running=32, num_tokens_in_flight=50_000, counters=counters)
    return Registrar([control], info, lambda: load)


async def main(first: int, count: int, num_workers: int, num_prompts: int) -> None:
    """Serve the hosts until the input ends."""
    log.configure("tandem-kv", False, level="error")
    os.nice(NICENESS)
    hosts = [StandIn(first + number, num_workers, num_prompts) for number in range(count)]  # type: ignore[abstract]
    servers = []
    for host in hosts:

        def add(server: Any, host: StandIn = host) -> None:
            kv_grpc.add_KvTransferServiceServicer_to_server(host, server)

        servers.append(GrpcServer("127.0.0.1:0", add, []))
    print(json.dumps([await server.start() for server in servers]), flush=True)
    control = (await asyncio.to_thread(sys.stdin.readline)).strip()
    beating = [Beating(host, control) for host in hosts]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    loop = asyncio.get_running_loop()
    begun, num_turns = loop.time(), 0
    while not ended.done():
        for number, host in enumerate(hosts):  # spread over the quarter of a second, as hosts are
            turn = begun + (num_turns + number / count) / PROMPTS_PER_SECOND
            await asyncio.sleep(max(0.0, turn - loop.time()))
            host.change()
            if num_turns % PROMPTS_PER_SECOND == 0:
                beating[number].beat()
        num_turns += 1
    await asyncio.gather(*(each.stop() for each in beating))
    await asyncio.gather(*(server.stop(0) for server in servers))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
